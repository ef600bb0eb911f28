// Best-path trace-back: the tokens that a best path ends in and its back-pointers, so that no more than
// these are copied to the host.
//
// One block per utterance that a result is wanted of: all threads look for the best token, and for the one
// with which the utterance ends best; one thread follows the back-pointers.
#include "search/word_graph/candidates.cuh"

constexpr int MAX_THREADS = 512;
constexpr int64 NO_KEY = 0x7fffffffffffffffll;

// What it costs to end in `state`, or where a closure arc of it leads; infinite if not final.
inline double end_cost(int state, int epsilon, int boost, const Workspace& work) {
  const Search& search = work.search;
  double cost = 0.0;
  if (epsilon != NONE) {
    const Epsilon closure = work.graph.epsilons[epsilon];
    const Boost boosting = boosted(closure.olabel, boost, work);
    cost += (double)(search.lm_weight * closure.cost - boosting.bonus);
    boost = boosting.state;
    state = closure.target;
  }
  const float final_cost = work.graph.states[state].final_cost;
  if (final_cost > largest_float()) return final_cost;
  cost += (double)(search.lm_weight * final_cost);
  if (search.boosts) {
    cost -= (double)(search.boosting_weight * work.boosting.states[boost].final_weight);
  }
  return cost;
}

// The cost of a token with all that comes after it if the utterance ends there.
inline double cost_with_end(const Token& token, const Workspace& work) {
  const int state = state_of(token.key), boost = boost_of(token.key);
  const int end = work.graph.states[state].epsilon_end;
  double least = token.cost + end_cost(state, NONE, boost, work);
  for (int e = work.graph.states[state].epsilon_begin; e < end; e++) {
    least = fmin(least, token.cost + end_cost(state, e, boost, work));
  }
  return least;
}

// The best of the tokens that a thread has seen.
struct Choice {
  double cost;
  int64 key;
  int token;

  void offer(double other, int64 other_key, int i) {
    if (other < cost || (other == cost && other_key < key)) *this = Choice{other, other_key, i};
  }
};

// The best of all threads goes to *token; of several that cost the same the one with the least key.
// False if there is none. Call with all threads; a barrier must follow.
inline bool choose(const Choice& own, int* token, uint64* scratch) {
  const double cost = block_reduce(own.cost, Min(), (double*)scratch);
  const int64 key = block_reduce(own.cost == cost ? own.key : NO_KEY, Min(), (int64*)scratch);
  if (own.key == key && key != NO_KEY) *token = own.token;
  return key != NO_KEY;
}

// Copy the back-pointers of a token, newest first, as far as there is capacity. One thread; their
// number.
inline int copy_path(int last, const BackPointer* back_pointers, BackPointer* path, int capacity) {
  int count = 0;
  for (int i = last; i != NONE; i = back_pointers[i].previous, count++) {
    if (count < capacity) path[count] = back_pointers[i];
  }
  return count;
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1) best_path(const TraceBackArgs args) {
  __shared__ uint64 scratch[LANES];
  __shared__ int chosen[2];
  const int64 a = blockIdx.x, b = args.rows[a];
  const StreamParams own = args.utterances[b];
  Workspace work;
  work.search = Search{{}, own};
  work.graph = Graph{
    args.graph_states, nullptr, args.graph_epsilons, args.graph_word_sequences, args.num_words,
  };
  work.boosting = Automaton{
    args.boosting_states + own.boosting_states, args.boosting_arcs + own.boosting_arcs, args.num_words,
  };
  const Token* tokens = args.tokens + b * args.held;

  const double infinity = -negative_infinity();
  Choice best{infinity, NO_KEY, NONE}, ending{infinity, NO_KEY, NONE};
  for (int i = thread(); i < args.counters[b].tokens; i += threads()) {
    const Token token = tokens[i];
    best.offer(token.cost, token.key, i);
    const double cost = cost_with_end(token, work);
    if (cost < infinity) ending.offer(cost, token.key, i);
  }
  choose(best, &chosen[0], scratch);
  const bool ends = choose(ending, &chosen[1], scratch);
  __syncthreads();
  if (thread() > 0) return;
  const Token first = tokens[chosen[0]], last = tokens[ends ? chosen[1] : chosen[0]];
  const int count = copy_path(
    args.final ? last.back_pointer : first.back_pointer, args.back_pointers + b * args.max_back_pointers,
    args.paths + a * args.capacity, args.capacity
  );
  args.found[a] = BestPath{first, last, ends, count};
}
