// paged_biglm on the GPU: the steps of cpu.py [LET], [XLLM], one block per utterance.
//
// One launch reads a chunk of every stream, as in cuda_wfst, whose room, tables and survivors these are,
// with tokens that differ by LM history too (TOKEN_KEY). In every frame
//
//   stay           tokens read a blank or their last label again     word_graph/labels.cuh
//   look_ahead     the best token's best way lowers the cutoff       ahead.cuh
//   join_groups    tokens become members of histories of groups      groups.cuh
//   visit_arcs     groups look at arcs, once for all histories       visits.cuh
//   take_free_arcs those without words are taken                     visits.cuh
//   run_errands    words below the cutoff ask the LMs, then go on    errands.cuh, answers.cuh, lms.cuh
//   commit         the beam and max_active choose who survives       word_graph/survivors.cuh
//
// Whether a word is asked for depends on the small LM's cost and on the cutoff that all ways without the
// LMs have left: so on no order. Answers are shared: each question is asked once, however many histories
// and arcs have it. An item of work is never a state or a token, but an arc of a group, or a history
// below the cutoff at an arc: these are dealt out evenly, whatever the sizes of states and groups.
//
// Shapes: B utterances, T frames of the chunk, V + 1 columns, N tokens, R records, L links, M members, A
// visits at most.
//
// Surviving tokens, their costs and their pasts are those of cpu.py to the bit, and so are look-ups and
// groups. About 8 MB per utterance at max_active 10000 (launch_shape.py), of which a frame touches what
// it fills.
//
// Compiled once per type of log-prob, with LINKS=1 for lattices, with EAGER=1 for eager composition.
// variants: LOG_PROB=float
// variants: LOG_PROB=float LINKS=1
// variants: LOG_PROB=float EAGER=1
// variants: LOG_PROB=float EAGER=1 LINKS=1
// variants: LOG_PROB=Half
// variants: LOG_PROB=BFloat16
#ifndef LOG_PROB
#define LOG_PROB float
#endif
#define TOKEN_KEY HistoryKey

#include "cuda/common.cuh"

typedef LOG_PROB LogProb;

#include "search/word_graph/survivors.cuh"
#include "search/word_graph/composition/ahead.cuh"
#include "search/word_graph/composition/eager.cuh"

constexpr int MAX_THREADS = 512;

// Nothing is known of the next frame. Call with all threads after a barrier; ends with one.
inline void begin_frame(Space& work) {
  work.followers.clear();
  __syncthreads();
  if (thread() == 0) {
    Tally& tally = *work.tally;
    tally.best = ordered_key(largest_float());
    tally.num_followers = tally.full = tally.num_links = 0;
    const int num_answers = work.ledger->num_answers;
    *work.ledger = Ledger{};
    work.ledger->num_answers = num_answers;
    work.ledger->ahead.source = NONE;
    work.common->current = work.current;
  }
  __syncthreads();
}

// See choose_labels.
__noinline__ bool list_labels(Row row, int columns, Space* common) {
  return choose_labels(row, columns, *common);
}

// Steps 2 to 4. Call with all threads after a barrier; ends with one.
inline int expand_groups(const Row& row, int count, Space& work) {
  const float least = least_acoustic_cost(row, work);
  if (!join_groups(count, least, work.common)) return GROUPS_FULL;
  if (!visit_arcs(row, least, work.common)) return GROUPS_FULL;
  sort_histories(work.rooms, work.ledger);
  take_free_arcs(row, work);
  run_errands(row, work);
  return DONE;
}

// All ways into the next frame that stay below the cutoff, as far as there is room for their keys. Call
// with all threads after a barrier.
inline int expand(const Row& row, int columns, int count, Space& work) {
  begin_frame(work);
  if (work.search.topology != GRAPH) {
    stay(row, count, work);
    recombine(work.followers, true, work);
  }
  const float cutoff = work.cutoff();
  if (!list_labels(row, columns, work.common)) return BAD_FRAME;
  if (EAGER) {
    if (!take_all_arcs(row, count, work)) return GROUPS_FULL;
    recombine(work.followers, true, work);
    return work.followers.size() > 0 ? DONE : NO_TOKEN;
  }
  if (work.tally->num_labels > 0) {
    look_ahead(row, count, work);
    if (work.cutoff() < cutoff) list_labels(row, columns, work.common);
  }
  if (work.tally->num_labels > 0) {
    const int status = expand_groups(row, count, work);
    if (status != DONE) return status;
  }
  recombine(work.followers, true, work);
  return work.followers.size() > 0 ? DONE : NO_TOKEN;
}

// Ranks between which the last one is looked for with which all keys find room; shared.
struct Limits {
  int64 low;
  int64 high;
};

// The ways into the next frame, or the cheapest if they are too many; see _expand_within_room in cpu.py.
// Call with all threads after a barrier.
inline int expand_within_room(
  const Row& row, int columns, int count, Limits& limits, bool& overflowed, Space& work
) {
  enum { ANY_WAY, BELOW_CUTOFF, BELOW_RANK };
  int kept = ANY_WAY;
  work.last_rank = ANY_RANK;
  while (true) {
    const int status = expand(row, columns, count, work);
    if (status != DONE && (status != NO_TOKEN || kept != BELOW_RANK)) return status;
    const bool full = work.tally->full;
    if (kept == ANY_WAY) {
      if (!full) return DONE;
      kept = BELOW_CUTOFF;
      work.last_rank = rank_of(work.cutoff(), {0, 0}) + (1ll << HASH_BITS);
      continue;
    }
    if (kept == BELOW_CUTOFF && !full) {
      work.last_rank = ANY_RANK;  // nothing was left out
      return DONE;
    }
    const bool half_used = 2 * work.followers.size() >= work.followers.capacity;
    if (!full && (half_used || limits.high - limits.low <= 1)) return status;
    __syncthreads();
    if (thread() == 0) {
      if (kept == BELOW_CUTOFF) limits.low = rank_of(work.best(), {0, 0});
      if (full) limits.high = work.last_rank;
      else limits.low = work.last_rank;
    }
    __syncthreads();
    kept = BELOW_RANK;
    overflowed = true;
    if (limits.low >= limits.high) return status;
    work.last_rank = limits.low + (limits.high - limits.low) / 2;
  }
}

// Bring the tokens of an utterance into its room. A barrier must follow.
inline void load_tokens(const Token* stored, int count, Workspace& work) {
  for (int i = thread(); i < count; i += threads()) {
    work.current[i] = stored[i];
    if (stored[i].cost == 0) atomicExch(&work.tally->best_token, i);
  }
}

// Read the frames progress[b].begin .. lengths[b] of every utterance b = blockIdx.x; see cuda_wfst's.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1) advance(
  const LogProb* log_probs,  // [B, T, V + 1]
  const int64* lengths,  // [B]
  const BigUtterance* utterances,  // [B]
  const Token* tokens,  // [B, held]
  const Progress* progress,  // [B]
  const Work* work_before,  // [B]
  Token* next_tokens,  // [B, 2, N]
  Progress* next_progress,  // [B]
  Work* next_work,  // [B]
  Record* records,  // [B, R]
  Link* links,  // [B, L], or null: none are kept
  const GraphState* graph_states, const GraphArc* graph_arcs, const Epsilon* graph_epsilons,
  const int* graph_compounds,
  const State* boosting_states, const Arc* boosting_arcs,
  const LMState* large_states, const uint64* large_labels, const uint64* large_arcs,
  const uint64* large_host_arcs, const float* large_codebook, CachedArc* large_cache,
  uint32 large_cache_slots, int large_label_bits, int large_target_bits, int large_cost_bits,
  const LMState* small_states, const uint64* small_labels, const uint64* small_arcs,
  const uint64* small_host_arcs, const float* small_codebook, CachedArc* small_cache,
  uint32 small_cache_slots, int small_label_bits, int small_target_bits, int small_cost_bits,
  const int64* labels_in_large, const int64* labels_in_small,  // [W] of each word of the graph
  int* follower_slots,  // [B, follower_slot_count], zeros
  Entry* follower_entries,  // [B, N]
  Way* ways,  // [B, W]
  int* labels,  // [B, V + 1]
  Member* members,  // [B, M]
  History* histories,  // [B, M]
  Group* groups,  // [B, M]
  uint64* order,  // [B, M]
  int* large_groups,  // [B, M / SORTED_BY_WARP + 1]
  int* member_slots, int* history_slots,  // [B, member_slot_count], zeros
  Visit* visits,  // [B, A]
  Errand* errands,  // [B, E]
  int* asked,  // [B, E]
  Answer* answers,  // [B, answers]
  int* answer_slots,  // [B, answer_slot_count], zeros
  int frames, int columns, int held,
  int max_tokens, int max_ways, int max_records, int max_links, int max_members, int max_visits,
  int max_errands, int max_answers,
  int follower_slot_count, int member_slot_count, int answer_slot_count,  // powers of two
  bool is_difference, int group_size,
  int num_words, int blank_id, int topology, float beam, int max_active, float acoustic_scale,
  float lattice_beam,
  int row_bytes  // of a row in shared memory; 0: rows are read where they lie
) {
  extern __shared__ __align__(16) unsigned char smem[];
  const int64 b = blockIdx.x;
  const BigUtterance own = utterances[b];
  Progress now = progress[b];
  __shared__ Ledger ledger;
  __shared__ Rooms rooms;
  __shared__ Space common;
  __shared__ Work taken;
  __shared__ Progress before;
  __shared__ Limits limits;
  // dynamic shared memory in the order of cuda_wfst's shared_bytes
  Tally* tally = (Tally*)smem;
  uint64* scratch = (uint64*)(tally + 1);
  int* histogram = (int*)(scratch + LANES);
  int* begins = histogram + BINS;
  uint8* rows_at = smem + (sizeof(Tally) + 8 * LANES + 4 * (BINS + 2 * (threads() + 1)) + 15) / 16 * 16;

  Space work;
  work.search = Search{
    blank_id, topology, beam, max_active, acoustic_scale, own.lm_weight, own.least_cost,
    own.boosting_weight, own.boosts != 0, own.most_bonus, lattice_beam,
  };
  work.graph = Graph{graph_states, graph_arcs, graph_epsilons, graph_compounds, num_words};
  work.boosting =
    Automaton{boosting_states + own.boosting_states, boosting_arcs + own.boosting_arcs, num_words};
  work.tally = tally;
  work.ledger = &ledger;
  work.rooms = &rooms;
  work.common = &common;
  work.scratch = scratch;
  work.histogram = histogram;
  work.tokens = Deal{begins, (int*)scratch};
  work.states = Deal{begins + threads() + 1, (int*)scratch};
  work.followers = Table{
    follower_slots + b * follower_slot_count, follower_slot_count - 1,
    follower_entries + b * max_tokens, nullptr, max_tokens, &tally->num_followers, 0,
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
  if (thread() == 0) {
    *tally = Tally{};
    ledger = Ledger{};
    taken = work_before[b];
    rooms.graph = work.graph;
    rooms.rescoring = Rescoring{
      {{large_states, large_labels, large_arcs ? large_arcs : large_host_arcs, large_codebook,
        large_label_bits, large_target_bits, large_cost_bits},
       large_cache, large_cache_slots},
      {{small_states, small_labels, small_arcs ? small_arcs : small_host_arcs, small_codebook,
        small_label_bits, small_target_bits, small_cost_bits},
       small_cache, small_cache_slots},
      is_difference, labels_in_large, labels_in_small, own.correction_weight,
    };
    rooms.group_size = group_size;
    rooms.members = members + b * max_members;
    rooms.histories = histories + b * max_members;
    rooms.groups = groups + b * max_members;
    rooms.order = order + b * max_members;
    rooms.large = large_groups + b * (max_members / SORTED_BY_WARP + 1);
    rooms.max_members = max_members;
    rooms.first_members = Firsts{member_slots + b * member_slot_count, member_slot_count - 1};
    rooms.first_histories = Firsts{history_slots + b * member_slot_count, member_slot_count - 1};
    rooms.visits = visits + b * max_visits;
    rooms.max_visits = max_visits;
    rooms.errands = errands + b * max_errands;
    rooms.asked = asked + b * max_errands;
    rooms.max_errands = max_errands;
    rooms.answers = answers + b * max_answers;
    rooms.max_answers = max_answers;
    rooms.answer_slots = answer_slots + b * answer_slot_count;
    rooms.answer_mask = answer_slot_count - 1;
    common = work;
  }
  __syncthreads();
  load_tokens(tokens + b * held, now.tokens, work);
  now.half = 0;
  now.status = DONE;
  const LogProb* first = log_probs + (b * frames + now.begin) * columns;
  RowReader rows(first, columns, lengths[b] - now.begin, rows_at, row_bytes);
  while (now.status == DONE && rows.any()) {
    const Row row = rows.next();
    if (thread() == 0) before = now;  // registers are scarce until the frame is expanded
    bool overflowed = false;
    const int status = expand_within_room(row, columns, now.tokens, limits, overflowed, work);
    now = before;
    now.status = status;
    now.overflowed += overflowed;
    if (now.status == DONE && KEEPS_LINKS && !has_room_for_links(now, work)) now.status = LINKS_FULL;
    if (now.status == DONE && !commit(row, now, work)) now.status = RECORDS_FULL;
    if (now.status == DONE) {
      if (thread() == 0) taken.add(ledger);
      now.begin++;
    }
    rows.wait();  // `expand` begins with a barrier
  }
  if (thread() == 0) {
    next_progress[b] = now;
    next_work[b] = taken;
  }
}
