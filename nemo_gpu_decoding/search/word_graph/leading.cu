// The tokens that a best path is about, so that no more than these and one past are copied to the host.
// Twin of best_end and trace_back in trace.py.
//
// One block per utterance that is asked about: all threads look for the best token, and for the one with
// which the utterance ends best; one thread follows the past of the leader.
#include "cuda/common.cuh"

typedef float LogProb;  // no row is read here

#include "search/word_graph/ways.cuh"

constexpr int MAX_THREADS = 512;
constexpr int64 NO_KEY = 0x7fffffffffffffffll;

struct Leading {  // launch_shape.LEADING
  Token best;  // the cheapest token
  Token ending;  // that with which the utterance ends best
  int ends;  // whether any token may end
  int records;  // in the past of the leader; above the room if there were more
};
static_assert(sizeof(Leading) == 56, "Leading differs from launch_shape.LEADING");

// What it costs to end in `state`, or where an epsilon record of it leads; infinite if not final. Twin of
// end_cost in trace.py.
inline double end_cost(int state, int epsilon, int boost, const Workspace& work) {
  const Search& search = work.search;
  double cost = 0.0;
  if (epsilon != NONE) {
    const Epsilon record = work.graph.epsilons[epsilon];
    const Boost boosting = boosted(record.word, boost, work);
    cost += (double)(search.lm_weight * record.cost - boosting.bonus);
    boost = boosting.state;
    state = record.target;
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
struct Candidate {
  double cost;
  int64 key;
  int token;

  void offer(double other, int64 other_key, int i) {
    if (other < cost || (other == cost && other_key < key)) *this = Candidate{other, other_key, i};
  }
};

// The best of all threads goes to *place; of several that cost the same the one with the least key. False
// if there is none. Call with all threads; a barrier must follow.
inline bool choose(const Candidate& own, int* place, uint64* scratch) {
  const double cost = block_reduce(own.cost, Min(), (double*)scratch);
  const int64 key = block_reduce(own.cost == cost ? own.key : NO_KEY, Min(), (int64*)scratch);
  if (own.key == key && key != NO_KEY) *place = own.token;
  return key != NO_KEY;
}

// Copy the past of a token, newest record first, as far as there is room. One thread; the number of
// records.
inline int copy_past(int record, const Record* records, Record* past, int room) {
  int count = 0;
  for (; record != NONE; record = records[record].previous, count++) {
    if (count < room) past[count] = records[record];
  }
  return count;
}

extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1) leading(
  const int* rows,  // [A] utterances that are asked about
  const Utterance* utterances,  // [B]
  const Token* tokens,  // [B, held]
  const Progress* progress,  // [B]
  const Record* records,  // [B, R]
  const GraphState* graph_states, const Epsilon* graph_epsilons, const int* graph_compounds,
  const State* boosting_states, const Arc* boosting_arcs,
  Leading* found,  // [A]
  Record* pasts,  // [A, room] of each leader, newest first
  int held, int max_records, int room, int num_words,
  bool final  // the leader is the token that ends best, if any may end; else the best token
) {
  __shared__ uint64 scratch[LANES];
  __shared__ int chosen[2];
  const int64 a = blockIdx.x, b = rows[a];
  const Utterance own = utterances[b];
  Workspace work;
  work.search = Search{};
  work.search.lm_weight = own.lm_weight;
  work.search.boosting_weight = own.boosting_weight;
  work.search.boosts = own.boosts != 0;
  work.graph = Graph{graph_states, nullptr, graph_epsilons, graph_compounds, num_words};
  work.boosting =
    Automaton{boosting_states + own.boosting_states, boosting_arcs + own.boosting_arcs, num_words};
  tokens += b * held;
  records += b * max_records;

  const double infinity = -negative_infinity();
  Candidate best{infinity, NO_KEY, NONE}, ending{infinity, NO_KEY, NONE};
  for (int i = thread(); i < progress[b].tokens; i += threads()) {
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
  const Token& leader = final ? last : first;
  found[a] = Leading{first, last, ends, copy_past(leader.record, records, pasts + a * room, room)};
}
