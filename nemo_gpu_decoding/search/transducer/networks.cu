// The networks on the GPU: what is left of them besides matrix products. See cuda_networks.py and,
// for what the weights are, fused_weights.py. Counterpart of networks.py.
//
// Row r of the joint is the r-th of B * K hypotheses; row r of the prediction network is one of its batch, which has rows
// for new texts only. There it reads entry sources[r] of the prediction cache, the text before its new token
// labels[r], and writes entry targets[r], the text with it. No entry is both a source and a target of one step, so
// the states of all texts are routed in place. Rows with nothing to compute have negative entries.
//
// Compiled once per type that the networks compute in. Gates and cells are float32 in all of them; what
// products read or give, hidden values and predictions are of that type.
// variants: VALUE=float
// variants: VALUE=Half
// variants: VALUE=BFloat16
#include "search/transducer/beam.cuh"

// What the joint's linear layer reads for hypothesis r: ReLU of its frame plus its prediction. Block r: row r.
// Rows that read no frame keep what they hold.
extern "C" __global__ void __launch_bounds__(MAX_THREADS) join_rows(const JoinRowsArgs args) {
  const int64 r = blockIdx.x, frame = args.frame_rows[r], text = args.text_rows[r];
  const int width = args.width;
  if (frame < 0 || text < 0) return;
  for (int i = thread(); i < width; i += threads()) {
    float sum = to_float(args.frames[frame * width + i]) + to_float(args.outputs[text * width + i]);
    round_to(args.hidden_rows[r * width + i], sum <= 0.0f ? 0.0f : sum);  // NaN stays, and is noticed
  }
}

inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// The part of a product that the next step needs: row r of [rows, columns], its first 4 H columns.
inline void keep_recalled(Value* recalled, int64 target, const Value* product, int size) {
  for (int i = thread(); i < 4 * size; i += threads()) recalled[target * 4 * size + i] = product[i];
}

// One layer of an LSTM, gates in torch's order: let in, keep, new, let out. Block r: row r.
//
// The first layer takes its inputs from `table`. Those above take them from `product`, and keep the
// other half of it for the layer below.
extern "C" __global__ void __launch_bounds__(MAX_THREADS) lstm_layer(const LstmLayerArgs args) {
  const int64 r = blockIdx.x, source = args.sources[r], target = args.targets[r];
  const int size = args.size;
  if (source < 0 || target < 0) return;
  const Value* inputs = args.table + (args.table != nullptr ? args.labels[r] * 4 * size : 0);
  if (args.product != nullptr) {
    const Value* own = args.product + r * 8 * size;
    keep_recalled(args.recalled_below, target, own, size);
    inputs = own + 4 * size;
  }
  const Value* recalled = args.recalled + source * 4 * size;
  const int64 before = (source * args.num_layers + args.layer) * size;
  const int64 after = (target * args.num_layers + args.layer) * size;
  for (int i = thread(); i < size; i += threads()) {
    float gates[4];
    for (int g = 0; g < 4; g++) {
      int column = g * size + i;
      float bias = args.bias != nullptr ? args.bias[column] : 0.0f;
      gates[g] = to_float(recalled[column]) + (to_float(inputs[column]) + bias);
    }
    float kept = sigmoid(gates[1]) * args.cells[before + i] + sigmoid(gates[0]) * tanhf(gates[2]);
    float value = sigmoid(gates[3]) * tanhf(kept);
    args.cells[after + i] = kept;
    round_to(args.hidden[after + i], value);
    round_to(args.hidden_rows[r * size + i], value);
  }
}

// After the last layer's product: keep what the next step needs, and the predictions. Block r: row r.
extern "C" __global__ void __launch_bounds__(MAX_THREADS) lstm_output(const LstmOutputArgs args) {
  const int64 r = blockIdx.x, target = args.targets[r];
  const int size = args.size, width = args.width;
  if (target < 0) return;
  const Value* own = args.product + r * (4 * size + width);
  keep_recalled(args.recalled, target, own, size);
  for (int i = thread(); i < width; i += threads()) {
    round_to(args.outputs[target * width + i], to_float(own[4 * size + i]) + args.bias[i]);
  }
}

// The labels that a stateless network sees: the new one, and those before it.
struct Context {
  int64 label;
  const int64* before;  // [positions - 1] the oldest first
  int positions;

  // The i-th last label.
  int64 operator[](int i) const { return i == 0 ? label : before[positions - 1 - i]; }
};

// (x - mean) * scale normalises the embeddings of a context, put side by side.
struct Norm {
  double mean, scale;

  // sums: [positions, V + 1, 2] sum of the values of each embedding and sum of their squares.
  Norm(const Context& context, const double* sums, int num_labels, int size, double epsilon) {
    double sum = 0.0, squares = 0.0;
    for (int i = 0; i < context.positions; i++) {
      const double* own = sums + 2 * ((int64)i * num_labels + context[i]);
      sum += own[0];
      squares += own[1];
    }
    mean = sum / size;
    scale = 1.0 / sqrt(fmax(squares / size - mean * mean, 0.0) + epsilon);
  }
};

// A network that sees the last labels only. Block r: row r.
extern "C" __global__ void __launch_bounds__(MAX_THREADS) stateless(const StatelessArgs args) {
  const int64 r = blockIdx.x, source = args.sources[r], target = args.targets[r];
  if (source < 0 || target < 0) return;
  const int kept = args.positions - 1, width = args.width;
  const Context context{args.labels[r], args.contexts + source * kept, args.positions};
  float mean = 0.0f, scale = 1.0f;
  if (args.sums != nullptr) {
    const Norm norm(context, args.sums, args.num_labels, args.size, args.epsilon);
    mean = (float)norm.mean;
    scale = (float)norm.scale;
  }
  for (int j = thread(); j < width; j += threads()) {
    float sum = 0.0f;
    for (int i = 0; i < args.positions; i++) {
      sum += args.tables[((int64)i * args.num_labels + context[i]) * width + j];
    }
    round_to(args.outputs[target * width + j], (sum - mean * args.ones[j]) * scale + args.bias[j]);
  }
  for (int i = thread(); i < kept; i += threads()) {
    args.contexts[target * kept + i] = context[kept - 1 - i];
  }
}
