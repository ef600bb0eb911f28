// cuda_wfst on the GPU: the steps of cpu.py [CUDA-WFST], one block per utterance.
//
// One launch reads a chunk of every stream. A block loops over the frames of its utterance, with the row
// of the frame and all counters in shared memory; tokens and tables lie in global memory, about 4.5 MB
// per utterance at max_active 10000 (launch_shape.py), of which a frame touches what it fills: small
// enough for the L2 cache. In every frame
//
//   stay           tokens read a blank or their last label again              labels.cuh
//   choose_labels  the row is scanned for labels that can stay below the cutoff
//   look_ahead     which the best token's own arcs lower beforehand
//   join_groups    tokens of one graph state become one group                 groups.cuh
//   take_arcs      arcs of all groups are dealt out to the threads            arcs.cuh
//   recombine      ways are entered into hash tables, the best to a key stays tables.cuh, ways.cuh
//   commit         a histogram of costs and the beam choose who survives      survivors.cuh
//
// For lattices recombine also notes every way as a link; commit keeps those that may matter (links.cuh).
//
// Shapes: B utterances, T frames of the chunk, V + 1 columns; at most N tokens, R records, L links.
//
// Surviving tokens, their costs and their pasts are those of cpu.py to the bit: ways to one key have a
// total order, sums are formed in the same order, and what bounds leave out cannot survive. Only the
// places of tokens, records and links depend on the order in which threads arrive.
//
// Compiled once per type of log-prob, with LINKS=1 for lattices.
// variants: LOG_PROB=float
// variants: LOG_PROB=float LINKS=1
// variants: LOG_PROB=Half
// variants: LOG_PROB=BFloat16
#ifndef LOG_PROB
#define LOG_PROB float
#endif

#include "cuda/common.cuh"

typedef LOG_PROB LogProb;

#include "search/word_graph/arcs.cuh"
#include "search/word_graph/survivors.cuh"

constexpr int MAX_THREADS = 512;

// All ways into the next frame that stay below the cutoff, as far as there is room for their keys.
// `best`: cost of the best way, if it is known, or the largest float. Call with all threads after a
// barrier.
inline int expand(const Row& row, int columns, int count, float best, Workspace& work) {
  Tally& tally = *work.tally;
  work.followers.clear();
  __syncthreads();
  if (thread() == 0) {
    tally.best = ordered_key(best);
    tally.num_followers = tally.full = tally.num_links = 0;
  }
  __syncthreads();
  if (work.search.topology != GRAPH) {
    stay(row, count, work);
    recombine(work.followers, true, work);
  }
  float cutoff = work.cutoff();
  if (!choose_labels(row, columns, work)) return BAD_FRAME;
  if (tally.num_labels > 0) {
    look_ahead(row, work);
    __syncthreads();
    if (work.cutoff() < cutoff) choose_labels(row, columns, work);
  }
  if (tally.num_labels > 0) move(row, count, work);
  return work.followers.size() > 0 ? DONE : NO_TOKEN;
}

// The ways into the next frame, or the cheapest if they are too many; see _expand_within_room in cpu.py.
// Call with all threads after a barrier.
inline int expand_within_room(const Row& row, int columns, Progress& now, Workspace& work) {
  enum { UNKNOWN_BEST, KNOWN_BEST, LIMITED };
  int phase = UNKNOWN_BEST;
  float best = largest_float();
  int64 low = 0, high = 0;
  work.last_rank = ANY_RANK;
  while (true) {
    const int status = expand(row, columns, now.tokens, best, work);
    if (status != DONE && phase != LIMITED) return status;
    const bool full = work.tally->full;
    if (phase != LIMITED) {
      if (!full) return DONE;
      best = work.best();
      if (phase++ == UNKNOWN_BEST) continue;
      now.overflowed++;
      low = rank_of(best, 0);
      high = rank_of(best + work.search.beam, 0) + (1ll << HASH_BITS);
    } else if (full) {
      high = work.last_rank;
    } else {
      if (high - low <= 1 || 2 * work.followers.size() >= work.followers.capacity) return status;
      low = work.last_rank;
    }
    if (low >= high) return DONE;
    work.last_rank = low + (high - low) / 2;
  }
}

// Bring the tokens of an utterance into its room. A barrier must follow.
inline void load_tokens(const Token* stored, int count, Workspace& work) {
  for (int i = thread(); i < count; i += threads()) {
    work.current[i] = stored[i];
    if (stored[i].cost == 0) atomicExch(&work.tally->best_token, i);
  }
}

// Read the frames progress[b].begin .. lengths[b] of every utterance b = blockIdx.x.
//
// Reads what the utterances had come to from `tokens` and `progress`, and leaves what they have come to
// in `next_tokens`, `next_progress` and in new records and links. An utterance that cannot go on says why
// in its status, and stands before the frame at fault.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1) advance(
  const LogProb* log_probs,  // [B, T, V + 1]
  const int64* lengths,  // [B]
  const Utterance* utterances,  // [B]
  const Token* tokens,  // [B, held]
  const Progress* progress,  // [B]
  Token* next_tokens,  // [B, 2, N]
  Progress* next_progress,  // [B]
  Record* records,  // [B, R]
  Link* links,  // [B, L], if LINKS is 1
  const GraphState* graph_states, const GraphArc* graph_arcs, const Epsilon* graph_epsilons,
  const int* graph_compounds,
  const State* boosting_states, const Arc* boosting_arcs,
  int* follower_slots,  // [B, follower_slot_count], zeros; also afterwards
  Entry* follower_entries,  // [B, N]
  int* group_slots,  // [B, group_slot_count], zeros; also afterwards
  Entry* group_entries,  // [B, G]
  Second* group_seconds,  // [B, G], or null with topologies other than normal, or if links are kept
  Way* ways,  // [B, W]
  int* labels,  // [B, V + 1]
  int frames, int columns, int held,
  int max_tokens, int max_groups, int max_ways, int max_records, int max_links,
  int follower_slot_count, int group_slot_count,  // powers of two
  int num_words, int blank_id, int topology, float beam, int max_active, float acoustic_scale,
  float lattice_beam,
  int row_bytes  // of a row in shared memory; 0: rows are read where they lie
) {
  extern __shared__ __align__(16) unsigned char smem[];
  const int64 b = blockIdx.x;
  const Utterance own = utterances[b];
  Progress now = progress[b];
  // shared memory in the order of launch_shape.shared_bytes
  Tally* tally = (Tally*)smem;
  uint64* scratch = (uint64*)(tally + 1);
  int* histogram = (int*)(scratch + LANES);
  int* begins = histogram + BINS;
  uint8* rows_at = smem + (sizeof(Tally) + 8 * LANES + 4 * (BINS + 2 * (threads() + 1)) + 15) / 16 * 16;

  Workspace work;
  work.search = Search{
    blank_id, topology, beam, max_active, acoustic_scale, own.lm_weight, own.least_cost,
    own.boosting_weight, own.boosts != 0, own.most_bonus, lattice_beam,
  };
  work.graph = Graph{graph_states, graph_arcs, graph_epsilons, graph_compounds, num_words};
  work.boosting =
    Automaton{boosting_states + own.boosting_states, boosting_arcs + own.boosting_arcs, num_words};
  work.tally = tally;
  work.scratch = scratch;
  work.histogram = histogram;
  work.tokens = Deal{begins, (int*)scratch};
  work.states = Deal{begins + threads() + 1, (int*)scratch};
  work.followers = Table{
    follower_slots + b * follower_slot_count, follower_slot_count - 1,
    follower_entries + b * max_tokens, nullptr, max_tokens, &tally->num_followers, 0,
  };
  work.groups = Table{
    group_slots + b * group_slot_count, group_slot_count - 1, group_entries + b * max_groups,
    group_seconds ? group_seconds + b * max_groups : nullptr, max_groups, &tally->num_groups, 0,
  };
  work.current = next_tokens + 2 * b * max_tokens;
  work.next = work.current + max_tokens;
  work.ways = ways + b * max_ways;
  work.max_ways = max_ways;
  work.reserved = 0;
  work.labels = labels + b * columns;
  work.records = records + b * max_records;
  work.max_records = max_records;
  work.last_rank = ANY_RANK;
  if (KEEPS_LINKS) {
    work.links = links + b * max_links + now.links;
    work.max_links = max_links - (int)now.links;
  }

  if (thread() == 0) *tally = Tally{};
  __syncthreads();
  load_tokens(tokens + b * held, now.tokens, work);
  now.half = 0;
  now.status = DONE;
  const LogProb* first = log_probs + (b * frames + now.begin) * columns;
  RowReader rows(first, columns, lengths[b] - now.begin, rows_at, row_bytes);
  while (now.status == DONE && rows.any()) {
    const Row row = rows.next();
    now.status = expand_within_room(row, columns, now, work);
    if (now.status == DONE && KEEPS_LINKS && !has_room_for_links(now, work)) now.status = LINKS_FULL;
    if (now.status == DONE && !commit(row, now, work)) now.status = RECORDS_FULL;
    if (now.status == DONE) now.begin++;
    rows.wait();  // `expand` begins with a barrier
  }
  work.followers.clear();
  if (thread() == 0) next_progress[b] = now;
}
