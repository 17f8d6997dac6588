#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace ktserve {

void bind_linear(nb::module_&) {}

}  // namespace ktserve
