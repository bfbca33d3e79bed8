"""Tests log-probs of prompts with echo of `/v1/completions`, by which evaluation harnesses score texts."""

import numpy as np
import openai
import pytest

from glm5_jax.inference.request import Request
from glm5_jax.inference.sampling import Sampling
from glm5_jax.text.tokenizer import Tokenizer
from tests.inference.test_engine import logprobs, make_engine

TOKENIZER = Tokenizer.default()
SCORE = Sampling(max_tokens=0, temperature=0.5, top_logprobs=2, prompt_logprobs=True)


def test_scores_prompts_in_chunks_as_trainer_forward():
    """The second prompt begins like the first, whose pages are cached, and gets all scores."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 2000, 45).tolist()
    prompts = [prompt, [*prompt[:40], 7], [3]]
    scorer = make_engine(prefill_chunk=16)
    handles = []
    for ids in prompts:
        handles.append(scorer.submit(Request(ids, SCORE)))
        while scorer.step():
            pass
    for ids, handle in zip(prompts, handles):
        completion, scored = handle.completion, handle.prompt_tokens
        assert (completion.ids, completion.finish_reason) == ([], "length")
        assert [token.id for token in scored] == ids[1:]
        want = logprobs(ids)[:-1]
        got = [token.logprob for token in scored]
        np.testing.assert_allclose(got, want[np.arange(len(got)), ids[1:]], atol=1e-5)
        for row, token in zip(want, scored):
            assert [value for _, value in token.top] == pytest.approx(np.sort(row)[::-1][:2])


def test_completion_echoes_logprobs_of_prompt(healthy):
    text = "To be, or not"
    ids = TOKENIZER.encode(text)
    with openai.OpenAI(base_url=f"{healthy.url}/v1", api_key="none", max_retries=0) as client:
        fields = dict(model="tiny", prompt=text, echo=True, logprobs=1, temperature=0)
        [scored] = client.completions.create(max_tokens=0, **fields).choices
        [longer] = client.completions.create(max_tokens=2, **fields).choices
        with pytest.raises(openai.BadRequestError, match="echo with logprobs cannot be streamed"):
            client.completions.create(max_tokens=2, stream=True, **fields)
    want = logprobs(ids)[:-1][np.arange(len(ids) - 1), ids[1:]]
    assert scored.text == text and scored.logprobs.token_logprobs[0] is None
    np.testing.assert_allclose(scored.logprobs.token_logprobs[1:], want, atol=1e-5)
    assert "".join(scored.logprobs.tokens) == text and scored.finish_reason == "length"
    assert longer.text.startswith(text) and len(longer.logprobs.tokens) == len(ids) + 2
    offsets = np.cumsum([0, *map(len, longer.logprobs.tokens)])[:-1]
    assert longer.logprobs.text_offset == offsets.tolist()
