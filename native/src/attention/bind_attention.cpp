#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace ktserve {

void bind_attention(nb::module_&) {}

}  // namespace ktserve
