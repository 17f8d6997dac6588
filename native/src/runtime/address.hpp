// Memory that Python owns crosses the binding as its address.
#pragma once

#include <cstdint>

namespace ktserve {

using Address = uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace ktserve
