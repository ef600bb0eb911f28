// The search of word graphs on the GPU: cuda_wfst [CUDA-WFST], and with COMPOSE=1 paged_biglm [LET],
// [XLLM].
//
// A launch decodes a chunk of every stream, with one block per utterance. A block loops over the frames of
// its utterance. Shared memory has the row of the frame and all counters. Global memory has the tokens and
// tables, about 5.5 MB per utterance at max_active 10000 (9 MB with COMPOSE). A frame accesses only the part
// that it fills, which fits the L2 cache. The steps of a frame are
//
//   offer_blanks_and_repeats  tokens read a blank or their last label again        labels.cuh
//   choose_labels             lists the labels of the row that can stay below the cutoff
//   tighten_cutoff            the best token's own arcs lower the cutoff
//   epsilon_closure           tokens in one graph state become one group           token_groups.cuh
//   expand_groups             expands the arcs of all groups                       frame.cuh
//   recombine                 of candidates with equal keys the best one stays     candidates.cuh
//   prune                     the beam and a histogram of costs choose the tokens  prune.cuh
//
// With COMPOSE=1 tokens also differ by LM context, and these steps differ:
//
//   tighten_cutoff            the best token's best arc lowers the cutoff          large_lm/tighten_cutoff.cuh
//   epsilon_closure           makes groups of LM contexts                          large_lm/contexts.cuh
//   list_group_arcs           lists arcs of groups, once for all LM contexts       large_lm/group_arcs.cuh
//   expand_without_lm         expands arcs without words                           large_lm/group_arcs.cuh
//   expand_with_lm            words below the cutoff query the LMs first           large_lm/queries.cuh
//
// A word queries the LMs if its cost by the small LM is below the cutoff after all candidates without LM
// queries. This does not depend on the order of work. Equal queries of different contexts and arcs are looked
// up once. The items of work are arcs of groups, and contexts below the cutoff at an arc; they are spread
// evenly over the threads.
//
// For lattices, recombine also adds every candidate to the links, and prune keeps those that the lattice may
// need (links.cuh).
//
// Tokens, costs and back-pointers equal those of the CPU to the bit. Candidates with one key have a total
// order, sums have the same order, and bounds skip only candidates that cannot survive. Only the indices of
// tokens, back-pointers and links depend on the order of threads.
//
// Variants: one per type of log-prob; LINKS=1 for lattices; COMPOSE=1 for a large LM; MIN_ACTIVE=1 for min_active > 0, which
// spills a register on sm_75.
// variants: LOG_PROB=float
// variants: LOG_PROB=float LINKS=1
// variants: LOG_PROB=Half
// variants: LOG_PROB=BFloat16
// variants: COMPOSE=1 LOG_PROB=float
// variants: COMPOSE=1 LOG_PROB=float LINKS=1
// variants: COMPOSE=1 LOG_PROB=Half
// variants: COMPOSE=1 LOG_PROB=BFloat16
// variants: LOG_PROB=float MIN_ACTIVE=1 arch>=80
// variants: COMPOSE=1 LOG_PROB=float MIN_ACTIVE=1
#if COMPOSE
#include "search/word_graph/large_lm/frame.cuh"
typedef LmAdvanceArgs AdvanceArgs;
#else
#include "search/word_graph/frame.cuh"
typedef PlainAdvanceArgs AdvanceArgs;
#endif

#include "search/word_graph/prune.cuh"

constexpr int MAX_THREADS = 512;

// Copy the tokens of an utterance to its workspace. A barrier must follow.
inline void load_tokens(const Token* stored, int count, Workspace& work) {
  for (int i = thread(); i < count; i += threads()) {
    work.current[i] = stored[i];
    if (stored[i].cost == 0) atomicExch(&work.counters->best_token, i);
  }
}

// An utterance has three places for tokens. A launch reads one of them and writes the others in turns, so that the
// utterance is unchanged if it cannot read a frame.
inline int next_place(int place) { return place == 2 ? 0 : place + 1; }
inline Token* tokens_at(const AdvanceArgs& args, int64 b, int place) {
  return args.tokens + (3 * b + place) * args.capacity.tokens;
}

// The workspace of utterance b. The layout of shared memory is that of `shared_bytes` in kernel_abi.py.
inline void open_workspace(
  const AdvanceArgs& args, int64 b, int64 num_links, unsigned char* shared, Workspace& work
) {
  const StreamParams own = args.utterances[b];
  const Capacity& capacity = args.capacity;
  work.search = Search{args.params, own};
  work.graph = Graph{
    args.graph_states + own.graph_states, args.graph_arcs, args.graph_epsilons, args.graph_word_sequences,
    args.params.num_words,
  };
  work.boosting = Automaton{
    args.boosting_states + own.boosting_states, args.boosting_arcs + own.boosting_arcs,
    args.params.num_words,
  };
  work.counters = (Counters*)shared;
  work.scratch = (uint64*)(work.counters + 1);
  work.histogram = (int*)(work.scratch + LANES);
  int* begins = work.histogram + BINS;
  work.closure_items = LoadBalancer{begins, (int*)work.scratch};
  work.arc_items = LoadBalancer{begins + threads() + 1, (int*)work.scratch};
  work.next_tokens = Table{
    args.token_slots + b * capacity.token_slots, capacity.token_slots - 1,
    args.token_entries + b * capacity.tokens, nullptr, capacity.tokens, &work.counters->num_next_tokens, 0,
  };
#if !COMPOSE
  work.groups = Table{
    args.group_slots + b * capacity.group_slots, capacity.group_slots - 1,
    args.group_entries + b * capacity.groups,
    capacity.seconds ? args.group_seconds + b * capacity.seconds : nullptr, capacity.groups,
    &work.counters->num_groups, 0,
  };
#endif
  work.current = tokens_at(args, b, next_place(args.counters[b].place));
  work.next = tokens_at(args, b, next_place(next_place(args.counters[b].place)));
  work.candidates = args.candidates + b * capacity.candidates;
  work.max_candidates = capacity.candidates;
  work.reserved = 0;
  work.labels = args.labels + b * capacity.columns;
  work.back_pointers = args.back_pointers + b * args.max_back_pointers;
  work.max_back_pointers = args.max_back_pointers;
  work.last_rank = ANY_RANK;
  if (KEEPS_LINKS) {
    work.links = args.links + b * args.max_links + num_links;
    work.max_links = args.max_links - (int)num_links;
  }
}

// Decode the frames counters[b].begin .. lengths[b] - 1 of every utterance b = blockIdx.x.
//
// The inputs are `tokens` and `counters`; the outputs are tokens in another place, `next_counters`, and new
// back-pointers and links. If an utterance cannot read a frame, its status is the reason, and its other
// outputs are those before that frame.
extern "C" __global__ void __launch_bounds__(MAX_THREADS, 1) advance(const AdvanceArgs args) {
  extern __shared__ __align__(16) unsigned char smem[];
  const int64 b = blockIdx.x;
  const int columns = args.capacity.columns;
  StreamCounters now = args.counters[b];
#if COMPOSE
  __shared__ LmShared shared;
  LmWorkspace work;
  open_workspace(args, b, now.links, smem, work);
  open_composition(args, b, shared, work);
#else
  Workspace work;
  open_workspace(args, b, now.links, smem, work);
#endif
  if (thread() == 0) *work.counters = Counters{};
  __syncthreads();
  load_tokens(tokens_at(args, b, now.place), now.tokens, work);
  now.status = DONE;
  const LogProb* first = args.log_probs + (b * args.frames + now.begin) * columns;
  uint8* buffers = smem + (sizeof(Counters) + 8 * LANES + 4 * (BINS + 2) + 15) / 16 * 16 + 8 * threads();
  RowReader rows(first, columns, args.lengths[b] - now.begin, buffers, args.shared_rows);
  while (now.status == DONE && rows.any()) {
    const Row row = rows.next();
    if (WIDENS) work.search.beam = args.params.beam;
    do {
#if COMPOSE
      now.status = expand_or_bisect(row, columns, now, shared, work);
#else
      now.status = expand_or_bisect(row, columns, now, work);
#endif
    } while (WIDENS && now.status == DONE && widen_beam(args.params.beam, work));
    if (now.status == DONE && KEEPS_LINKS && !has_capacity_for_links(now, work)) now.status = LINKS_FULL;
    const bool is_widened = WIDENS && work.search.beam > args.params.beam;
    if (now.status == DONE && !prune(row, is_widened, now, work)) now.status = BACK_POINTERS_FULL;
    if (now.status == DONE) {
#if COMPOSE
      if (thread() == 0) add_work(shared.counters, shared.work);
#endif
      now.begin++;
    }
    rows.wait();  // `expand` begins with a barrier
  }
  // the next launch expects empty tables
  work.next_tokens.clear();
#if COMPOSE
  int* cache_slots = args.cache_slots + b * args.capacity.cache_slots;
  for (int at = thread(); at < args.capacity.cache_slots; at += threads()) cache_slots[at] = 0;
  if (thread() == 0) args.next_work[b] = shared.work;
#endif
  if (thread() > 0) return;
  now.place = next_place(now.place);
  if (work.current != tokens_at(args, b, now.place)) now.place = next_place(now.place);
  args.next_counters[b] = now;
}
