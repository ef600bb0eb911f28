// Trace-back of best paths on the device, so that only these are copied to the host.
//
// One block per utterance of the request. All threads search for the best token, for the token in which the
// utterance ends at the lowest cost, and for the newest back-pointer that all tokens share. One thread follows
// the back-pointers. With COMPOSE=1 (paged_biglm) the cost of the end contains the LM score difference.
//
// variants: COMPOSE=0
// variants: COMPOSE=1
#include "search/word_graph/candidates.cuh"

#if COMPOSE
#include "search/word_graph/large_lm/scorer.cuh"
typedef LmTraceBackArgs TraceBackArgs;
typedef LmBestPath BestPath;

struct EndWorkspace : Workspace {
  LmPair lms;
  int64 large_end;  // label of </s>; below 0: the end costs nothing
  int64 small_end;
};
#else
typedef PlainTraceBackArgs TraceBackArgs;
typedef PlainBestPath BestPath;
typedef Workspace EndWorkspace;
#endif

constexpr int MAX_THREADS = 512;
constexpr int64 LAST_KEY = 0x7fffffffffffffffll;

#if COMPOSE
inline float cost_of_end(const PagedLM& lm, int64 state, int64 label, LookupCounters& counters) {
  return label < 0 ? 0.0f : lookup(lm, state, label, counters).cost;
}

// LM score difference of the word of a closure arc, if there is one, and of the end after it; weighted.
inline double end_difference(int olabel, int64 lm, const EndWorkspace& work) {
  const LmPair& lms = work.lms;
  double total = 0.0;
  if (lms.weight == 0) return total;
  LookupCounters counters{};  // the search does not count look-ups of results
  if (olabel != 0) {
    const LMStep step = cost_of_label(olabel, lm, work.graph, lms, counters);
    total += (double)(lms.weight * step.cost);
    lm = step.target;
  }
  float cost = cost_of_end(lms.large, large_of(lm), work.large_end, counters);
  if (!lms.is_difference) cost -= cost_of_end(lms.small, small_of(lm), work.small_end, counters);
  return total + (double)(lms.weight * cost);
}
#endif

// Cost of the end after a token, or after a closure arc; infinite if that state is not final.
inline double end_cost(const Key& key, int epsilon, const EndWorkspace& work) {
  const Search& search = work.search;
  int state = state_of(key), boost = boost_of(key), olabel = 0;
  double cost = 0.0;
  if (epsilon != NONE) {
    const Epsilon closure = work.graph.epsilons[epsilon];
    olabel = closure.olabel;
    const Boost boosting = boosted(olabel, boost, work);
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
#if COMPOSE
  cost += end_difference(olabel, key.lm, work);
#endif
  return cost;
}

// The cost of a token plus the lowest cost of an end after it.
inline double cost_with_end(const Token& token, const EndWorkspace& work) {
  const GraphState& state = work.graph.states[state_of(token.key)];
  const int begin = state.epsilon_begin, end = state.epsilon_end;
  double least = -negative_infinity();
  for (int e = begin - 1; e < end; e++) {
    least = fmin(least, token.cost + end_cost(token.key, e < begin ? NONE : e, work));
  }
  return least;
}

// The lowest key of all threads. Call with all threads.
inline int64 least_key(int64 key, uint64* scratch) { return block_reduce(key, Min(), (int64*)scratch); }
inline LmKey least_key(const LmKey& key, uint64* scratch) {
  const int64 first = least_key(key.key, scratch);
  return {first, least_key(key.key == first ? key.lm : LAST_KEY, scratch)};
}

// The best token of a thread.
struct Choice {
  double cost;
  Key key;
  int token;

  void offer(double other, const Key& other_key, int i) {
    if (other < cost || (other == cost && other_key < key)) *this = Choice{other, other_key, i};
  }
};

inline Choice no_choice() {
#if COMPOSE
  return {-negative_infinity(), {LAST_KEY, LAST_KEY}, NONE};
#else
  return {-negative_infinity(), LAST_KEY, NONE};
#endif
}

// Write the best token of all threads to *token; ties are broken by the lower key. False if there is none.
// Call with all threads; a barrier must follow.
inline bool choose(const Choice& own, int* token, uint64* scratch) {
  const double cost = block_reduce(own.cost, Min(), (double*)scratch);
  const Key key = least_key(own.cost == cost ? own.key : no_choice().key, scratch);
  if (own.token != NONE && own.cost == cost && own.key == key) *token = own.token;
  return cost < -negative_infinity();
}

// The newest back-pointer that all tokens share, or NONE. A back-pointer has a higher number than the one
// before it, so that of two the one with the higher number is followed until both are equal. Call with all
// threads.
inline int common_ancestor(
  const Token* tokens, int count, int common, const BackPointer* back_pointers, uint64* scratch
) {
  for (int i = thread(); i < count; i += threads()) {
    int other = tokens[i].back_pointer;
    while (other != common) {
      if (other > common) other = back_pointers[other].previous;
      else common = back_pointers[common].previous;
    }
  }
  return block_reduce(common, Min(), (int*)scratch);
}

// Copy the back-pointers of a token, newest first, up to the capacity, and count all of them. Call with one
// thread.
inline void copy_path(
  int last, int common, const BackPointer* back_pointers, BackPointer* path, int capacity, BestPath& found
) {
  for (int i = last; i != NONE; i = back_pointers[i].previous) {
    if (found.back_pointers < capacity) path[found.back_pointers] = back_pointers[i];
    found.back_pointers++;
    found.shared += i <= common;
  }
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1) best_path(const TraceBackArgs args) {
  __shared__ uint64 scratch[LANES];
  __shared__ int chosen[2];
  const int64 a = blockIdx.x, b = args.rows[a];
  const StreamParams own = args.utterances[b];
  EndWorkspace work;
  work.search = Search{{}, own};
  work.graph = Graph{
    args.graph_states + own.graph_states, nullptr, args.graph_epsilons, args.graph_word_sequences, args.num_words,
  };
  work.boosting = Automaton{
    args.boosting_states + own.boosting_states, args.boosting_arcs + own.boosting_arcs, args.num_words,
  };
#if COMPOSE
  open_lms(args, own.difference_weight, work.lms);
  work.large_end = args.large_end;
  work.small_end = args.small_end;
#endif
  const Token* tokens = args.tokens + (3 * b + args.counters[b].place) * args.held;
  const BackPointer* back_pointers = args.back_pointers + b * args.max_back_pointers;
  const int count = args.counters[b].tokens;

  Choice best = no_choice(), ending = no_choice();
  for (int i = thread(); i < count; i += threads()) {
    const Token token = tokens[i];
    best.offer(token.cost, token.key, i);
    const double cost = cost_with_end(token, work);
    if (cost < -negative_infinity()) ending.offer(cost, token.key, i);
  }
  choose(best, &chosen[0], scratch);
  const bool ends = choose(ending, &chosen[1], scratch);
  __syncthreads();
  const Token first = tokens[chosen[0]], last = tokens[ends ? chosen[1] : chosen[0]];
  const int newest = args.final ? last.back_pointer : first.back_pointer;
  const int common = args.final ? NONE : common_ancestor(tokens, count, newest, back_pointers, scratch);
  if (thread() > 0) return;
  BestPath found{first, last, ends, 0, 0};
  copy_path(newest, common, back_pointers, args.paths + a * args.capacity, args.capacity, found);
  args.found[a] = found;
}
