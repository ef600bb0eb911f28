// The prediction network on the GPU: what is left of it besides matrix products. See cuda_prediction.py
// and, for what the weights are, folding.py.
//
// Row r is the r-th of B * K hypotheses. It reads entry sources[r] of the memory of predictions, the text
// before its new token labels[r], and writes entry targets[r], the text with it. No entry is both a
// source and a target of one step, so the states of all texts are routed in place. Rows with nothing
// to compute have negative entries.
#include "cuda/common.cuh"

constexpr int MAX_THREADS = 256;

inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// The part of a product that the next step needs: row r of [rows, columns], its first 4 H columns.
inline void keep_recalled(float* recalled, int64 target, const float* product, int size) {
  for (int i = thread(); i < 4 * size; i += threads()) recalled[target * 4 * size + i] = product[i];
}

// One layer of an LSTM, gates in torch's order: let in, keep, new, let out. Block r: row r.
//
// The first layer takes its inputs from `table`. Those above take them from `product`, and keep the
// other half of it for the layer below.
extern "C" __global__ void __launch_bounds__(MAX_THREADS) lstm_layer(
  const int64* labels, const int64* sources, const int64* targets,  // [rows]
  const float* table,  // [V + 1, 4 H] bias included; null above the first layer
  const float* product,  // [rows, 8 H] hidden values below times (recurrent | input) weights, or null
  const float* bias,  // [4 H] of the inputs in `product`, or null
  float* recalled_below,  // [E, 4 H] hidden values below times recurrent weights, or null
  const float* recalled,  // [E, 4 H] the same of this layer
  float* hidden, float* memory,  // [E, layers, H]
  float* hidden_rows,  // [rows, H] the new hidden values, for the next product
  int size,  // H
  int layer, int num_layers
) {
  const int64 r = blockIdx.x, source = sources[r], target = targets[r];
  if (source < 0 || target < 0) return;
  const float* inputs = table + (table != nullptr ? labels[r] * 4 * size : 0);
  if (product != nullptr) {
    keep_recalled(recalled_below, target, product + r * 8 * size, size);
    inputs = product + r * 8 * size + 4 * size;
  }
  recalled += source * 4 * size;
  const int64 before = (source * num_layers + layer) * size, after = (target * num_layers + layer) * size;
  for (int i = thread(); i < size; i += threads()) {
    float gates[4];
    for (int g = 0; g < 4; g++) {
      int column = g * size + i;
      gates[g] = recalled[column] + (inputs[column] + (bias != nullptr ? bias[column] : 0.0f));
    }
    float kept = sigmoid(gates[1]) * memory[before + i] + sigmoid(gates[0]) * tanhf(gates[2]);
    float value = sigmoid(gates[3]) * tanhf(kept);
    memory[after + i] = kept;
    hidden[after + i] = value;
    hidden_rows[r * size + i] = value;
  }
}

// After the last layer's product: keep what the next step needs, and the predictions. Block r: row r.
extern "C" __global__ void __launch_bounds__(MAX_THREADS) lstm_output(
  const int64* targets,  // [rows]
  const float* product,  // [rows, 4 H + J] hidden values times (recurrent weights | projection)
  const float* bias,  // [J] of the projection
  float* recalled,  // [E, 4 H] of the last layer
  float* outputs,  // [E, J]
  int size,  // H
  int width  // J
) {
  const int64 r = blockIdx.x, target = targets[r];
  if (target < 0) return;
  const float* own = product + r * (4 * size + width);
  keep_recalled(recalled, target, own, size);
  for (int i = thread(); i < width; i += threads()) {
    outputs[target * width + i] = own[4 * size + i] + bias[i];
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
extern "C" __global__ void __launch_bounds__(MAX_THREADS) stateless(
  const int64* labels, const int64* sources, const int64* targets,  // [rows]
  const float* tables,  // [positions, V + 1, J] projected embeddings, those of the last label first
  const double* sums,  // see `Norm`, or null where nothing is normalised
  const float* ones,  // [J] the projection of a vector of ones
  const float* bias,  // [J]
  int64* contexts,  // [E, positions - 1] labels of each text, the oldest first
  float* outputs,  // [E, J]
  double epsilon,  // of the norm
  int size,  // of all embeddings together
  int width,  // J
  int num_labels, int positions
) {
  const int64 r = blockIdx.x, source = sources[r], target = targets[r];
  if (source < 0 || target < 0) return;
  const int kept = positions - 1;
  const Context context{labels[r], contexts + source * kept, positions};
  float mean = 0.0f, scale = 1.0f;
  if (sums != nullptr) {
    const Norm norm(context, sums, num_labels, size, epsilon);
    mean = (float)norm.mean;
    scale = (float)norm.scale;
  }
  for (int j = thread(); j < width; j += threads()) {
    float sum = 0.0f;
    for (int i = 0; i < positions; i++) sum += tables[((int64)i * num_labels + context[i]) * width + j];
    outputs[target * width + j] = (sum - mean * ones[j]) * scale + bias[j];
  }
  for (int i = thread(); i < kept; i += threads()) {
    contexts[target * kept + i] = context[kept - 1 - i];
  }
}
