// A layer's routed experts with LoRA, forward and backward, on the packed weights that serving reads.
//
//   forward, position by position (RoutedBatch: sorted by expert, then adapter slot)
//     t = s A x                                   kept as well                        | only rows with LoRA
//     gate, up = W x + b + B t                    kept, if asked for; h = silu(gate) up, or its clamped form
//     t = s A h                                                                       | only rows with LoRA
//     out = sum_j w_j (W h + b + B t)
//
//   backward; d: the gradient of a position's row of out, without the router's weight w
//     u = s B^T d                                                                     | only rows with LoRA
//     dh = W_down^T d + A^T u;  dw = <dh, h>;  d_gate, d_up from w dh, gate and up
//     u = s B^T d_gate (d_up);  t = s A h;  dA += u x^T (h^T);  dB += d t^T           | only rows with LoRA
//     dx = W_gate^T d_gate + W_up^T d_up + A^T u of both, summed over a row's positions
//
// dw needs no output of down: <d, y> = <W_down^T d + A^T u, h> + <d, b>. Biases b get no gradients. A work item makes
// the panels it multiplies with (training/panels.hpp), two at a time, in memory of its own: W^T of a pair from the
// packed weights, LoRA matrices from float32. Nothing is added across work items, and they are cut by the shapes alone:
// results do not depend on threads.
//
// Products with the base weights and with LoRA are bf16 with float32 sums, unless the layer's are float32. LoRA's share
// of few rows is added from the float32 matrices as they are.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <mutex>
#include <span>
#include <vector>

#include "experts/layer.hpp"
#include "experts/moe_batch.hpp"
#include "experts/routed_batch.hpp"
#include "gemm/kernels.hpp"
#include "runtime/pool.hpp"
#include "training/panels.hpp"

namespace ktserve {

// Parts of rows are short runs of memory: those of rows so far behind are fetched.
inline constexpr int64_t kRowsAhead = 8;
inline void fetch_lines(const uint8_t* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i);
}

// An adapter's float32 matrices of a layer: A [E, r, in], B [E, out, r] of gate, up, down.
struct TrainLora {
  int slot;
  int64_t rank;
  float scale;
  const float* a[3];
  const float* b[3];
  // Of the same shapes: backward writes them, zeros for experts that no row of the slot has chosen. Null: not wanted.
  float* grad_a[3];
  float* grad_b[3];
};

struct TrainBatch {
  const int64_t* ids;    // [rows, top_k], -1: skipped
  const float* weights;  // [rows, top_k]
  const int32_t* slots;  // [rows], 0: no LoRA
  const void* hidden;    // [rows, hidden], float32 or bf16
  int64_t rows, top_k;
  bool bf16;  // hidden, and all other rows of the caller
};

class ExpertTrainer {
 public:
  ExpertTrainer(WorkerPool& pool, Isa isa);

  Isa isa() const { return kernels_.isa; }
  WorkerPool& pool() const { return pool_; }

  // out [rows, hidden]. kept: null, or memory in hidden's type that is filled for `backward`: gate and up of each
  // choice, [rows * top_k, 2, intermediate], and behind them LoRA's t of both, [rows * top_k, 2, the largest rank].
  // Throws std::invalid_argument for an id or slot out of range; nothing has been written then.
  void forward(const ExpertLayer& layer, const std::vector<TrainLora>& loras, const TrainBatch& batch, void* out,
               void* kept);
  // grad_out [rows, hidden]; grad_hidden the same, or null; grad_weights [rows, top_k]. kept: null: computed again.
  void backward(const ExpertLayer& layer, const std::vector<TrainLora>& loras, const TrainBatch& batch,
                const void* kept, const void* grad_out, void* grad_hidden, float* grad_weights);

 private:
  static constexpr int64_t kItemColumns = 128;
  // A range of an expert's columns (outputs of a product) for a range of its positions.
  struct Item {
    int32_t expert;
    int32_t row, row_end;
    int32_t column, column_end;
    int32_t range;  // number of the column range
  };
  // Positions of one expert and one adapter.
  struct Group {
    const TrainLora* lora;
    int32_t expert;
    int32_t row, row_end;
  };
  // out[i] = s P[i] x for rows with LoRA: P[i] is A of a matrix, or its B^T if `transposed`. Two share x, as gate and
  // up do. x: by position, or null: `rows` of the caller, of which each position's is made where it is needed.
  struct Projection {
    std::vector<int> matrices;
    bool transposed;
    const ScratchRows* x;
    const RowView* rows;
    ScratchRows* out[2];
  };
  // A range of a group's rows for a projection.
  struct Segment {
    const Projection* projection;
    const Group* group;
    int64_t row, row_end;
  };
  // A range of columns of a group's gradients: of dA of gate and up, which read the same x (0); of dA of down; of dB of
  // gate, up, down.
  struct GradientJob {
    const Group* group;
    int kind;
    int64_t column, columns;
  };
  // Memory of a worker, each part as large as was ever needed.
  struct Room {
    Arena parts[5];
    uint8_t* part(int index, int64_t bytes);
  };
  enum Part { kPanels, kLoraPanels, kTile, kSecondTile, kRows };

  void check(const ExpertLayer& layer, const std::vector<TrainLora>& loras, const TrainBatch& batch) const;
  void by_chunks(const ExpertLayer& layer, const std::vector<TrainLora>& loras, const TrainBatch& batch,
                 const std::function<void(const TrainBatch&, int64_t first)>& call);
  void begin(const ExpertLayer& layer, const std::vector<TrainLora>& loras, const TrainBatch& batch);

  // projection: of whose output panels the columns are; -1: of none, so that shards do not matter.
  void cut(int projection, int64_t first, int64_t last);
  using Job = std::function<void(int64_t, Room&)>;
  // Calls `body` for 0 .. count - 1 and, evenly between them, `job` for 0 .. jobs - 1: what mostly waits for memory
  // runs beside what mostly computes.
  void side_by_side(int64_t count, const Job& body, int64_t jobs, const Job& job);
  void each_item(const std::function<void(const Item&, Room&)>& body, int64_t jobs = 0, const Job& job = {});

  // Beside it `projections`, which do not need what it makes.
  void gather(const TrainBatch& batch, const RowView& rows, int64_t n, Format format, bool by_expert, ScratchRows& to,
              const std::vector<Projection>& projections);
  void pack_row(const RowView& rows, int64_t row, int64_t n, Format format, bool dequantised, uint8_t* to) const;
  void project(const std::vector<Projection>& projections);
  // What forward keeps of a chunk of rows, or has kept.
  struct Kept {
    uint8_t* gate_up;  // null: nothing is kept
    uint8_t* t;
    int64_t rank;
    bool bf16;
    uint8_t* t_of(int matrix, int64_t position) const { return t + (position * 2 + matrix) * rank * (bf16 ? 2 : 4); }
  };
  Kept kept_of(const ExpertLayer& layer, const std::vector<TrainLora>& loras, const TrainBatch& batch, const void* kept,
               int64_t first) const;
  // t of gate and up of a group's rows, from where forward kept it.
  void restore(const Group& group);
  // The parts of `project`, whose results have room then; `projections` must outlive them.
  std::vector<Segment> segments(const std::vector<Projection>& projections);
  void project_rows(const Segment& segment, Room& room);
  // t: float32 rows of the segment, of its matrices behind one another, `width` floats each; times the scale.
  void put_projected(const Segment& segment, float* t, int64_t width);
  // Rows from a position on, as products read them, from a column on; those of the caller; and rows as float32 [count,
  // n] in memory of the worker.
  RowView view(const ScratchRows& rows, int64_t position, int64_t column) const;
  RowView caller_rows(const RowView& of, int64_t position) const;
  const float* widened(const RowView& rows, int64_t count, int64_t n, Room& room) const;
  // Those of an item's rows.
  std::span<const Group> groups_of(const Item& item) const;
  // Fetches into the second-level cache what is read of B (A) of each adapter for an item, a share whenever `next` is
  // called, `shares` times in all. Of the item behind it, where LoRA is what comes first of an item.
  class Fetch {
   public:
    Fetch(const ExpertTrainer& trainer, const Item& item, std::initializer_list<int> matrices, bool transposed,
          int64_t shares);
    void next();

   private:
    void slice(int matrix, const Group& group) const;

    const ExpertTrainer& trainer_;
    const Item* item_;  // null: nothing
    std::span<const Group> groups_;
    int matrices_[2] = {};
    bool transposed_;
    int64_t slices_, shares_, done_ = 0;
  };
  // tile += B t of the columns of an item, or A^T u if `transposed`; t (u): rows in the format of LoRA products.
  void add_lora(int matrix, bool transposed, const Item& item, const ScratchRows& t, float* tile, int64_t stride,
                Room& room) const;
  // Whether that is the tail of the item's product with the base weights: if all rows are of one adapter.
  bool has_tail(int matrix, bool transposed, const Item& item) const;
  DotTail lora_tail(int matrix, bool transposed, const Item& item, const ScratchRows& t, Room& room) const;
  // B (A^T) of a group and the columns of an item.
  uint8_t* lora_panels(int matrix, bool transposed, const Item& item, const Group& group, Room& room) const;
  void add_bias(int projection, const Item& item, float* tile, int64_t stride) const;
  // <d, b> of down, d: a row of the caller's gradient.
  float bias_product(int64_t expert, const RowView& d, Room& room) const;
  // out = W x + b + B t. next: the panels that are read behind these. It calls `fetch` base_shares(projection, item)
  // times.
  void base_product(int projection, const Item& item, const ScratchRows& x, const ScratchRows& t, float* out,
                    int64_t stride, const uint8_t* next, Fetch& fetch, Room& room) const;
  int64_t base_step(int projection, const Item& item) const;  // panels
  int64_t base_shares(int projection, const Item& item) const;
  // out = W^T d + A^T u, or out += that if `adds`. It calls `fetch` for each pair of panels. next, next_item: whose W^T
  // comes behind this one, if that is known.
  void transposed_product(int projection, const Item& item, const ScratchRows& d, const ScratchRows& u, float* out,
                          int64_t stride, bool adds, int next, const Item* next_item, Fetch& fetch, Room& room) const;
  // Whether it needs no panels of W^T.
  bool few(int projection, const Item& item) const {
    const Format format = layer_->shape().formats[projection];
    return item.row_end - item.row <= panels_.few && product_ == Format::bf16 &&
           (format == Format::bf16 || !plain(format));
  }
  // The work item behind one of them, which the same worker mostly computes next; null: none.
  const Item* behind(const Item& item) const { return &item == &items_.back() ? nullptr : &item + 1; }
  const uint8_t* next_panels(int projection, const Item& item) const {
    const Item* next = behind(item);
    return next == nullptr ? nullptr : layer_->panel(projection, next->expert, next->column / kPanel);
  }

  // Keeps gate and up, and t where `kept_` says so.
  void gate_up(const TrainBatch& batch, void* kept);
  void gate_up_item(const Item& item, void* kept, bool kept_bf16, Room& room);
  void down(const TrainBatch& batch, void* out);
  // Beside it t of gate and up is restored, if it was kept.
  void hidden_gradient(const TrainBatch& batch, const void* kept);
  void hidden_gradient_item(const Item& item, const TrainBatch& batch, const void* kept, Room& room);
  std::vector<GradientJob> gradient_jobs() const;
  // adds: to what the rows before these gave.
  void lora_gradient(const GradientJob& job, bool adds, Room& room);
  // Of experts that no row has chosen.
  void clear_gradients(const std::vector<TrainLora>& loras);
  // LoRA's gradients as well. grad_hidden: null: these alone.
  void input_gradient(const TrainBatch& batch, void* grad_hidden, bool adds);
  void weight_gradient(const TrainBatch& batch, float* grad_weights);
  // out = the sums over a row's positions of y, with the router's weights or 1, for a slice of columns.
  void combine(const TrainBatch& batch, bool weighted, int64_t first, int64_t last, void* out);
  int64_t slice_columns() const;

  bool dequantised(int64_t expert, Format format) const {
    return !plain(format) && dequantised_[static_cast<size_t>(expert)] != 0;
  }
  Room& room(int worker) { return rooms_[static_cast<size_t>(worker)]; }

  WorkerPool& pool_;
  const Kernels& kernels_;
  const PanelKernels& panels_;
  std::mutex running_;
  std::vector<Room> rooms_;  // by worker

  // Of the chunk of rows that is computed.
  const ExpertLayer* layer_ = nullptr;
  Format product_ = Format::bf16;  // of LoRA products and of all of backward
  RoutedBatch routed_;
  RowView hidden_ = {}, grad_out_ = {};  // of the caller
  std::vector<Group> groups_;
  std::vector<int32_t> first_group_;  // by expert
  int64_t max_rank_ = 0;
  Kept kept_ = {};
  std::vector<uint8_t> dequantised_;  // by expert: whether forward's products dequantise
  std::vector<Item> items_;
  int64_t ranges_ = 0;
  // Rows by position. x of gate and up, h: as forward's products read them; the others: product_.
  ScratchRows x_[2], h_, h_lora_, t_[3], u_[3], d_, d_gate_, d_up_, y_;
  std::vector<float> weight_parts_;  // [positions, ranges]: parts of dw
  Arena again_;                      // gate and up that were not kept
};

}  // namespace ktserve
