"""Faults in kernels that the self-check must find: text of a kernel file, and the text that replaces it."""

from typing import NamedTuple


class Mutant(NamedTuple):
    strategy: str  # whose check must find it
    file: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.strategy} {self.file.rpartition('/')[2]} {self.old[:40]}"


# strategy -> kernel file -> {text: what replaces it}
FAULTS = {
    "flexctc_beam": {
        "search/flexctc_beam/beam.cuh": {
            "column > blank_id ? column - 1 : column": "column",
            "state.backoff_bound : state.upper_bound": "state.backoff_bound : state.backoff_bound",
        },
        "search/flexctc_beam/kernel.cu": {"hypothesis.score + row[last], item": "hypothesis.score + row[blank], item"},
        "search/flexctc_beam/frame.cuh": {
            "? hypothesis.blank_score : hypothesis.score": "? hypothesis.score : hypothesis.score"
        },
        "search/flexctc_beam/candidates.cuh": {
            "rank == beam_size - 1": "rank == beam_size - 2",
            "score_of(counters->best_key) - threshold": "score_of(counters->best_key) - 0.5f * threshold",
        },
        "search/flexctc_beam/select.cuh": {
            "score = log_add(score, work.next[j].score)": "score = fmaxf(score, work.next[j].score)",
            "next.boosting_state = candidate.boosting_state;": "",
        },
        "search/flexctc_beam/prefix.cuh": {"log_add(repeat, arrival)": "fmaxf(repeat, arrival)"},
        "search/flexctc_beam/finish.cu": {
            "if (scores[i] > scores[k] ||": "if (false ||",
            "lm_states[hypothesis.lm_state].final_weight": "lm_states[0].final_weight",
            "differs |= slots[k] != slots[0];": "differs |= slots[k] > slots[0];",
        },
        "fusion/fusion.cuh": {"weight += state.backoff_weight;": ""},
        "search/flexctc_beam/backpointers.cuh": {"run_probability / run)": "run_probability)"},
    },
    "alsd_pp": {
        "search/transducer/scoring.cuh": {
            "blank_log_prob * (1.0f + fusion.alpha())": "blank_log_prob * fusion.alpha()",
            "log1p(-(double)blank) * alpha": "log1p(-(double)blank)",
            "if (duration(d) > duration(best)) best = d;": "",
        },
        "search/transducer/beam.cuh": {"max(1, duration)": "duration + 1"},
        "search/transducer/networks.cu": {
            "sum <= 0.0f ? 0.0f : sum": "sum",
            "sigmoid(gates[3]) * tanhf(kept)": "sigmoid(gates[3]) * kept",
            "context[kept - 1 - i]": "context[kept - i]",
        },
        "search/transducer/schedule.cu": {"first + stream.kept + t": "first + t"},
        "search/transducer/alsd.cu": {
            "params.late ? params.blank_mode : NO_SCORE": "LM_WEIGHTED_FULL",
            "min(count, params.beam_size)": "min(count, params.beam_size - 1)",
        },
        "search/transducer/merge.cuh": {
            "score = log_add(score, work.chosen[j].score)": "score = fmaxf(score, work.chosen[j].score)",
            "next.lm_state = chosen.lm_state;": "",
        },
        "search/transducer/expand.cuh": {"(base + scoring.bound) + scoring.longest": "base + scoring.longest"},
    },
    "aes_pp": {
        "search/transducer/aes.cu": {"own.counters.expansions == 0": "own.counters.expansions == 1"},
        "search/transducer/pool.cuh": {
            "total = log_add(total, other);": "",
            "beam[k].open = beam[k].frame == frame": "beam[k].open = true",
            "before += work.beam[j].open;": "before++;",
        },
        "search/transducer/expand.cuh": {
            "score_of(best.keys[0]) - best.gamma": "score_of(best.keys[0]) - 2 * best.gamma"
        },
    },
    "cuda_wfst": {
        "search/word_graph/candidates.cuh": {
            "boost.bonus += work": "boost.bonus = work",
            "if (a.arc != b.arc) return a.arc < b.arc;": "if (a.arc != b.arc) return a.arc > b.arc;",
        },
        "search/word_graph/token_groups.cuh": {"cost += search.lm_weight * closure.cost;": ""},
        "search/word_graph/arc_ranges.cuh": {
            "if (arc < end && graph.arcs[arc].ilabel != label) end = arc;": "end = arc;"
        },
        "search/word_graph/frame.cuh": {"search.topology == NORMAL && label == last_label(origin, work)": "false"},
        "search/word_graph/labels.cuh": {"cost_of(row[label - 1], search)": "cost_of(row[label], search)"},
        "search/word_graph/prune.cuh": {
            "total + work.histogram[last + 1] <= work.search.max_active": "total <= work.search.max_active / 2",
            "work.search.min_active == 0 ||": "true ||",
            "token.probability += probability;": "",
        },
        "search/word_graph/links.cuh": {"> search.lattice_beam": "> 0.25f * search.lattice_beam"},
        "search/word_graph/compact.cu": {"copied.previous = numbers[copied.previous];": "copied.previous = -1;"},
        "search/word_graph/best_path.cu": {
            "cost += (double)(search.lm_weight * final_cost);": "",
            "found.shared += i <= common;": "found.shared += i < common;",
        },
    },
    "paged_biglm": {
        "search/word_graph/large_lm/scorer.cuh": {
            "large.cost - small.cost": "large.cost",
            "return {large.cost, lm_of(large.target, 0)};": "return {large.cost, lm};",
        },
        "lm/packed.cuh": {"cost += lm.states[state].backoff_cost;": ""},
        "lm/paged.cuh": {"found.high << 32 | uint32(found.low)": "found.high << 31 | uint32(found.low)"},
        "search/word_graph/large_lm/contexts.cuh": {
            "cost -= boosting.bonus;": "",
            "if (a >> 32 != b >> 32) return a < b;": "if (a >> 32 != b >> 32) return a > b;",
        },
        "search/word_graph/large_lm/group_arcs.cuh": {
            "min(group.count, work.buffers->contexts_per_group)": "group.count"
        },
        "search/word_graph/large_lm/queries.cuh": {
            "answer_queries(work.buffers, work.lm_counters);  // for pending words": ""
        },
        "search/word_graph/large_lm/query_cache.cuh": {"query.difference += weighted": "query.difference = weighted"},
        "search/word_graph/best_path.cu": {"cost += end_difference(olabel, key.lm, work);": ""},
    },
}
MUTANTS = [
    Mutant(strategy, file, old, new)
    for strategy, files in FAULTS.items()
    for file, faults in files.items()
    for old, new in faults.items()
]
