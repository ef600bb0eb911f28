// The search of word graphs on the GPU: cuda_wfst [CUDA-WFST], and with COMPOSE=1 paged_biglm [LET],
// [XLLM].
//
// One launch reads a chunk of every stream, one block per utterance. A block loops over the frames of
// its utterance, with the row of the frame and all counters in shared memory; tokens and tables lie in
// global memory, about 4.5 MB per utterance at max_active 10000 (8 MB with COMPOSE), of which a frame
// touches what it fills: small enough for the L2 cache. In every frame
//
//   offer_blanks_and_repeats  tokens read a blank or their last label again        labels.cuh
//   choose_labels             the row is scanned for labels that can stay below the cutoff
//   tighten_cutoff            which the best token's own arcs lower beforehand
//   epsilon_closure           tokens in one graph state become one group           token_groups.cuh
//   expand_groups             arcs of all groups are spread over the threads       expand.cuh
//   recombine                 of candidates with one key the best stays            candidates.cuh
//   prune                     a histogram of costs and the beam choose the tokens   prune.cuh
//
// With COMPOSE=1 tokens differ by LM context too, and the steps in between are others:
//
//   tighten_cutoff            the best token's best arc lowers the cutoff          tighten_cutoff.cuh
//   epsilon_closure           groups of LM contexts of tokens                      large_lm/contexts.cuh
//   list_group_arcs           groups look at arcs, once for all LM contexts        large_lm/group_arcs.cuh
//   expand_without_lm         arcs without words are expanded                      large_lm/group_arcs.cuh
//   expand_with_lm            words below the cutoff query the LMs first           large_lm/queries.cuh
//
// Whether the LMs are queried for a word depends on the small LM's cost and on the cutoff that all
// candidates without the LMs have left: so on no order. Answers are shared: each query is looked up
// once, however many contexts and arcs have it. An item of work is never a state or a token, but an arc
// of a group, or a context below the cutoff at an arc: these are spread evenly over the threads.
//
// For lattices recombine also notes every candidate as a link; prune keeps those that may matter
// (links.cuh).
//
// Surviving tokens, their costs and their back-pointers are those of the CPU to the bit: candidates
// with one key have a total order, sums are formed in the same order, and what bounds leave out cannot
// survive. Only the indices of tokens, back-pointers and links depend on the order in which threads
// arrive.
//
// Compiled once per type of log-prob, with LINKS=1 for lattices, with COMPOSE=1 for a large LM.
// variants: LOG_PROB=float
// variants: LOG_PROB=float LINKS=1
// variants: LOG_PROB=Half
// variants: LOG_PROB=BFloat16
// variants: COMPOSE=1 LOG_PROB=float
// variants: COMPOSE=1 LOG_PROB=float LINKS=1
// variants: COMPOSE=1 LOG_PROB=Half
// variants: COMPOSE=1 LOG_PROB=BFloat16
#if COMPOSE
#include "search/word_graph/large_lm/frame.cuh"
typedef LmAdvanceArgs AdvanceArgs;
#else
#include "search/word_graph/frame.cuh"
typedef PlainAdvanceArgs AdvanceArgs;
#endif

#include "search/word_graph/prune.cuh"

constexpr int MAX_THREADS = 512;

// Bring the tokens of an utterance into its workspace. A barrier must follow.
inline void load_tokens(const Token* stored, int count, Workspace& work) {
  for (int i = thread(); i < count; i += threads()) {
    work.current[i] = stored[i];
    if (stored[i].cost == 0) atomicExch(&work.counters->best_token, i);
  }
}

// The workspace of utterance b. Shared memory is used in the order of kernel_abi.shared_bytes.
inline void open_workspace(
  const AdvanceArgs& args, int64 b, int64 num_links, unsigned char* shared, Workspace& work
) {
  const StreamParams own = args.utterances[b];
  const Capacity& capacity = args.capacity;
  work.search = Search{args.params, own};
  work.graph = Graph{
    args.graph_states, args.graph_arcs, args.graph_epsilons, args.graph_word_sequences, args.params.num_words,
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
  work.current = args.next_tokens + 2 * b * capacity.tokens;
  work.next = work.current + capacity.tokens;
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

// Read the frames counters[b].begin .. lengths[b] of every utterance b = blockIdx.x.
//
// Reads what the utterances had come to from `tokens` and `counters`, and leaves what they have come to
// in `next_tokens`, `next_counters` and in new back-pointers and links. An utterance that cannot go on
// says why in its status, and stands before the frame at fault.
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
  load_tokens(args.tokens + b * args.held, now.tokens, work);
  now.half = 0;
  now.status = DONE;
  const LogProb* first = args.log_probs + (b * args.frames + now.begin) * columns;
  uint8* buffers = smem + (sizeof(Counters) + 8 * LANES + 4 * (BINS + 2) + 15) / 16 * 16 + 8 * threads();
  RowReader rows(first, columns, args.lengths[b] - now.begin, buffers, args.row_bytes);
  while (now.status == DONE && rows.any()) {
    const Row row = rows.next();
#if COMPOSE
    now.status = expand_or_bisect(row, columns, now, shared, work);
#else
    now.status = expand_or_bisect(row, columns, now, work);
#endif
    if (now.status == DONE && KEEPS_LINKS && !has_capacity_for_links(now, work)) now.status = LINKS_FULL;
    if (now.status == DONE && !prune(row, now, work)) now.status = BACK_POINTERS_FULL;
    if (now.status == DONE) {
#if COMPOSE
      if (thread() == 0) add_work(shared.counters, shared.work);
#endif
      now.begin++;
    }
    rows.wait();  // `expand` begins with a barrier
  }
#if COMPOSE
  if (thread() == 0) args.next_work[b] = shared.work;
#else
  work.next_tokens.clear();
#endif
  if (thread() == 0) args.next_counters[b] = now;
}
