#include "training/turning.hpp"

#include <algorithm>

namespace ktserve {
namespace {

constexpr int64_t kPanelsAhead = 4;  // whose columns are fetched: runs too short for the prefetchers of a CPU

}  // namespace

void Turning::begin(const PanelKernels& kernels, const What& what, uint8_t* out) {
  kernels_ = &kernels;
  what_ = what;
  out_ = out;
  k_ = what.layer->inner_of(what.projection);
  size_ = panel_size(what.layer->shape().formats[what.projection], k_);
  const int64_t rows = what.layer->rows_of(what.projection);
  out_size_ = panel_size(what.to, rows);
  all_ = panels_of(rows) * (what.columns / kBlock);
  done_ = 0;
  shard_ = -1;
  shard_end_ = 0;
}

void Turning::run(int64_t units) {
  const ExpertLayer& layer = *what_.layer;
  const Format format = layer.shape().formats[what_.projection];
  const int64_t blocks = what_.columns / kBlock;
  const int64_t bytes = kPanel * (what_.to == Format::f32 ? 64 : 32);  // of a panel of W in one of W^T
  for (const int64_t end = std::min(all_, done_ + units); done_ < end; ++done_) {
    const int64_t panel = done_ / blocks;
    const int64_t block = done_ % blocks;
    const auto columns = [&](int64_t later, int64_t b) {
      return ColumnBlock{format, panel_ + later * size_, k_, what_.column + b * kBlock};
    };
    if (block == 0) {
      if (panel < shard_end_) panel_ += size_;
      while (panel >= shard_end_) {
        shard_end_ = layer.first_panel(what_.projection, static_cast<int>(++shard_) + 1);
        panel_ = layer.panel(what_.projection, what_.expert, panel);
        for (int64_t i = 0; i < kPanelsAhead && panel + i < shard_end_; ++i) {
          for (int64_t b = 0; b < blocks; ++b) kernels_->fetch_block(columns(i, b));
        }
      }
    }
    if (panel + kPanelsAhead < shard_end_) kernels_->fetch_block(columns(kPanelsAhead, block));
    kernels_->transpose_block(columns(0, block), what_.to, out_ + 2 * block * out_size_ + panel * bytes, out_size_);
  }
}

}  // namespace ktserve
