// W^T of some columns of an expert's matrix, made into panels a block at a time: by itself, or beside products.
#pragma once

#include <cstdint>

#include "experts/layer.hpp"
#include "gemm/kernels.hpp"
#include "training/panels.hpp"

namespace ktserve {

class Turning final : public Beside {
 public:
  struct What {
    const ExpertLayer* layer = nullptr;
    int projection = 0;
    int64_t expert = 0, column = 0, columns = 0;  // multiples of 32
    Format to = Format::bf16;

    friend bool operator==(const What&, const What&) = default;
  };

  // Panels at `out`, panel_size(to, rows of the matrix) apart.
  void begin(const PanelKernels& kernels, const What& what, uint8_t* out);
  // Whether that is what was begun last, and not forgotten since.
  bool begun(const What& what) const { return what == what_; }
  void forget() { what_ = {}; }

  int64_t left() const { return all_ - done_; }  // units
  void run(int64_t units) override;
  const uint8_t* finish() {
    run(left());
    return out_;
  }

 private:
  const PanelKernels* kernels_ = nullptr;
  What what_;
  uint8_t* out_ = nullptr;
  int64_t k_ = 0, size_ = 0, out_size_ = 0;  // of the matrix; bytes of its panels, and of those made
  int64_t all_ = 0, done_ = 0;               // blocks of 32 columns of the panels, one panel after the other
  const uint8_t* panel_ = nullptr;
  int64_t shard_ = 0, shard_end_ = 0;  // that it lies in, and its end in panels
};

}  // namespace ktserve
