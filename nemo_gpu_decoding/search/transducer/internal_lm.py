"""Estimate the language model that a transducer has learnt from its prediction network and joint alone.

The joint reads an encoder frame of zeros. So the joint's probabilities of tokens, blank excluded, depend on the text
only. The method is that of Meng et al. 2021, "Internal language model estimation for domain-adaptive end-to-end speech
recognition", arXiv 2011.01991, section 3. In the paper, the prediction network reads the whole text. In this module,
the network reads one token, so that the result is a bigram LM, which is subtracted like an LM of the training text.
"""

import numpy as np
import torch

from nemo_gpu_decoding.fusion.ngram import nemo_symbol
from nemo_gpu_decoding.lm.arpa import Arpa, NGramBlock
from nemo_gpu_decoding.search.transducer.networks import TransducerNetworks

MOST_SUCCESSORS = 1024  # bigrams per context; less likely tokens back off to the 1-grams
CHUNK = 256  # contexts that the networks read together


@torch.inference_mode()
def internal_lm(networks: TransducerNetworks) -> Arpa:
    """Return the internal LM as a bigram LM over tokens.

    A 1-gram is the mean of a token's bigrams over all contexts. The LM has no `</s>`, because a transducer emits none.

    Args:
        networks: prediction network and joint; V tokens.

    Returns:
        V 1-grams, `<s>`, and up to V + 1 times `MOST_SUCCESSORS` bigrams; log10, symbols in NeMo's encoding.
    """
    tokens, most = networks.vocab_size, min(networks.vocab_size, MOST_SUCCESSORS)
    successors, probs, total = [], [], np.zeros(tokens)
    with networks.evaluation():
        silence = networks.project_encoder(torch.zeros(1, networks.encoder_size))
        start, state = networks.start()
        for begin in range(-1, tokens, CHUNK):  # context -1 is the begin of a text
            labels = torch.arange(max(0, begin), min(begin + CHUNK, tokens), device=start.device)
            predictions, _ = networks.predict(
                labels, tuple(part.expand(len(labels), *part.shape[1:]) for part in state)
            )
            if begin < 0:
                predictions = torch.cat([start, predictions])
            logits = networks.join(silence.expand(len(predictions), -1), predictions)[:, :tokens]
            rows = torch.softmax(logits.double(), dim=-1)
            total += rows.sum(0).cpu().numpy()
            likely = rows.topk(most).indices.sort().values
            successors.append(likely.cpu().numpy().astype(np.int32))
            probs.append(rows.gather(1, likely).cpu().numpy())
    kept, given = np.concatenate(successors), np.concatenate(probs)
    single = total / (tokens + 1)
    # the context's probability of all other tokens, relative to that of the 1-grams
    left = np.maximum(1 - given.sum(1), 1e-9) / np.maximum(1 - single[kept].sum(1), 1e-9)
    backoffs = np.log10(left) if most < tokens else np.zeros(tokens + 1)
    ones = NGramBlock(1, np.arange(tokens + 1, dtype=np.int32)[:, None], np.append(-99.0, np.log10(single)), backoffs)
    contexts = np.repeat(np.arange(tokens + 1, dtype=np.int32), most)
    twos = NGramBlock(2, np.column_stack([contexts, kept.ravel() + 1]), np.log10(given.ravel()), np.zeros(kept.size))
    return Arpa(("<s>", *map(nemo_symbol, range(tokens))), (ones, twos))
