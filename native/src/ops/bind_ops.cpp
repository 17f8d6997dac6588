#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace ktserve {

void bind_ops(nb::module_&) {}

}  // namespace ktserve
