// The Python module native._native. Each part binds itself in its own bind_*.cpp; buffers cross as addresses and
// shapes.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace ktserve {
void bind_core(nb::module_& module);
void bind_bridge(nb::module_& module);
void bind_experts(nb::module_& module);
void bind_attention(nb::module_& module);
void bind_linear(nb::module_& module);
void bind_ops(nb::module_& module);
void bind_delta(nb::module_& module);
void bind_decoder(nb::module_& module);
void bind_training(nb::module_& module);
}  // namespace ktserve

NB_MODULE(_native, module) {
  nanobind::set_leak_warnings(false);  // caches of Python modules hold formats until the interpreter has ended
  module.doc() = "CPU kernels: worker pool, packed weights, experts, attention, linear.";
  ktserve::bind_core(module);
  ktserve::bind_bridge(module);  // before all tasks
  ktserve::bind_experts(module);
  ktserve::bind_attention(module);
  ktserve::bind_linear(module);
  ktserve::bind_ops(module);
  ktserve::bind_delta(module);  // before the decoder's parts
  ktserve::bind_decoder(module);
  ktserve::bind_training(module);
}
