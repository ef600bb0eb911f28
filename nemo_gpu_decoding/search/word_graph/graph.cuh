// The word graph and the tokens that wander through it, as global memory holds them. Twins of
// graph/csr.py, tokens.py, ways.py and launch_shape.py.
#pragma once

#include "fusion/fusion.cuh"
#include "search/word_graph/keys.cuh"

struct GraphState {  // csr.GRAPH_STATE
  int arc_begin;
  int arc_end;
  int epsilon_begin;
  int epsilon_end;
  float final_cost;  // inf: an utterance can't end here
  float least_cost;  // the smallest cost of its arcs; inf without arcs
};
static_assert(sizeof(GraphState) == 24, "GraphState differs from csr.GRAPH_STATE");

struct GraphArc {  // csr.GRAPH_ARC
  int label;  // column of the log-probs
  int word;  // 0 for none
  float cost;
  int target;
};
static_assert(sizeof(GraphArc) == 16, "GraphArc differs from csr.GRAPH_ARC");

struct Epsilon {  // csr.EPSILON
  int word;  // 0 for none; from the number of words on, a compound
  float cost;
  int target;
  float least_cost;  // that of the target, here to save a look
};
static_assert(sizeof(Epsilon) == 16, "Epsilon differs from csr.EPSILON");

struct Graph {
  const GraphState* states;  // [S]
  const GraphArc* arcs;  // [A], those of a state sorted by label
  const Epsilon* epsilons;  // [E]
  const int* compounds;  // [C, 2]: the word label num_words + i stands for these two
  int num_words;
};

enum Topology { COMPACT, NORMAL, MINIMAL, GRAPH };  // graph/topology.py

// What stays the same for a whole utterance; ways.Search.
struct Search {
  int blank_id;
  int topology;
  float beam;
  int max_active;
  float acoustic_scale;
  float lm_weight;
  float least_cost;  // no epsilon record and arc together cost less; weighted, <= 0
  float boosting_weight;
  bool boosts;
  float most_bonus;  // no word gets a larger one; weighted
  float lattice_beam;
};

// What an utterance wants of its own; launch_shape.UTTERANCE.
struct Utterance {
  int64 boosting_states;  // where its automaton begins among all; states are counted from there
  int64 boosting_arcs;
  float lm_weight;
  float least_cost;
  float boosting_weight;
  float most_bonus;
  int boosts;
  int unused;
};
static_assert(sizeof(Utterance) == 40, "Utterance differs from launch_shape.UTTERANCE");

enum Move { BLANK_MOVE = -2, REPEAT_MOVE = -1, NEW_TOKEN = 0 };  // the former two in place of an arc
constexpr int NONE = -1;
constexpr int BINS = 256;  // of the histogram of costs

struct Token {  // launch_shape.TOKEN
  Key key;
  float cost;  // above that of the best token of the frame
  int record;  // newest record of its past, or NONE
  int run;  // frames that its last label lasted
  float probability;  // sum of the label's posteriors over these frames
};
static_assert(sizeof(Token) == 16 + sizeof(Key), "Token differs from launch_shape.TOKEN");

struct Record {  // tokens.RECORD
  int previous;
  int arc;
  int epsilon;  // taken before the arc, or NONE
  int frame;  // counted from the start of the stream
  int run;  // of the label before
  float probability;  // of the label before
};
static_assert(sizeof(Record) == 24, "Record differs from tokens.RECORD");

struct Link {  // tokens.LINK
  int source;
  int target;  // in the frame being worked on: entry of the followers
  int arc;
  int epsilon;
  float cost;  // of this step
  float acoustic_cost;  // part of it; in the frame being worked on: of the whole way
  int label;  // column that it reads
  int move;  // Move
  int frame;
};
static_assert(sizeof(Link) == 36, "Link differs from tokens.LINK");

// How far an utterance has come; launch_shape.PROGRESS.
struct Progress {
  int tokens;
  int records;
  int half;  // of the room for tokens, in which they are
  int status;  // Status
  int wanted;  // RECORDS_FULL, LINKS_FULL: records or links that the next frame may need
  int begin;  // frames of the chunk that were read
  int64 frames;
  double cost;  // of the best token; the tokens' own costs are above it
  int64 limited;  // frames in which max_active left hypotheses out
  int64 overflowed;  // frames in which a table was full
  int64 links;
};
static_assert(sizeof(Progress) == 64, "Progress differs from launch_shape.PROGRESS");

enum Status { DONE, BAD_FRAME, NO_TOKEN, RECORDS_FULL, LINKS_FULL };  // ways.py

// A number that orders ways by cost, and keys of equal cost somehow, but always alike; tokens.rank_of.
constexpr int64 ANY_RANK = 0x7fffffffffffffffll;
constexpr int HASH_BITS = 31;
inline int64 rank_of(float cost, const Key& key) {
  int bits = __float_as_int(cost + 0.0f);  // -0 becomes +0
  int64 ordered = bits < 0 ? -(int64)(bits & 0x7fffffff) : bits;
  return ordered * (1ll << HASH_BITS) + (int64)(hash_of(key) >> (64 - HASH_BITS));
}

// The first arc of the state with a label that is not smaller.
inline int first_arc(const Graph& graph, const GraphState& state, int label) {
  int low = state.arc_begin, high = state.arc_end;
  while (low < high) {
    int middle = (low + high) >> 1;
    if (graph.arcs[middle].label < label) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}
