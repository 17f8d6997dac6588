// Work that can be run again and again: what a bridge or a Python caller replays.
#pragma once

namespace ktserve {

struct Task {
  virtual ~Task() = default;
  virtual void run() const = 0;  // throws what goes wrong; may then be run again
};

}  // namespace ktserve
