#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace ktserve {

void bind_experts(nb::module_&) {}

}  // namespace ktserve
