"""all-MiniLM-L6-v2 through the SDK: its vectors are those of transformers, whatever they run beside; what it cannot do is refused."""

import minilm
import numpy as np
import pytest
import torch
from pagoda import LLM, PoolingParams
from pagoda.hal.errors import RequestError

TEXTS = ["Hello world.", "The quick brown fox jumps over the lazy dog, and then it sleeps.", "a", "Pagodas are towers with many eaves."]


@pytest.fixture(scope="module")
def llm():
    where = minilm.folder()
    if where is None:
        yield None
        return
    with LLM(str(where), device="cpu", dtype="float32", max_num_batched_tokens=64) as made:
        yield made


@pytest.fixture
def mini(llm, require):
    require(minilm.PACKAGE, llm is not None)
    return llm


def test_vectors_are_those_of_transformers_for_texts_in_any_company(mini):
    texts = [*TEXTS, " ".join(TEXTS * 8)]
    outputs = mini.embed(texts)
    want = minilm.vectors(minilm.folder(), [output.prompt_token_ids for output in outputs])
    got = torch.tensor([output.outputs.embedding for output in outputs], dtype=torch.float64)
    assert [ids[0] for ids in (output.prompt_token_ids for output in outputs)] == [101] * 5
    assert (got - want).abs().max() < 1e-6
    alone = mini.embed(texts[1])[0].outputs.embedding
    assert np.abs(np.array(alone) - np.array(outputs[1].outputs.embedding)).max() < 1e-6


def test_raw_short_and_tokenwise_vectors(mini):
    whole = np.array(mini.embed(TEXTS[1])[0].outputs.embedding)
    raw = mini.encode(TEXTS[1], PoolingParams(use_activation=False))[0].outputs.data
    short = np.array(mini.embed(TEXTS[1], PoolingParams(dimensions=64))[0].outputs.embedding)
    each = mini.encode(TEXTS[1], PoolingParams(use_activation=False), pooling_task="token_embed")[0]
    assert np.abs(raw / np.linalg.norm(raw) - whole).max() < 1e-6
    assert abs(np.linalg.norm(raw) - 1) > 0.01
    assert np.abs(whole[:64] / np.linalg.norm(whole[:64]) - short).max() < 1e-6
    assert each.outputs.data.shape == (len(each.prompt_token_ids), 384)
    assert np.abs(each.outputs.data.mean(0) - raw).max() < 1e-5


def test_scores_are_cosines(mini):
    query, *_ = "What is a pagoda?", None
    scores = [output.outputs.score for output in mini.score(query, TEXTS)]
    first, *others = (np.array(output.outputs.embedding) for output in mini.embed([query, *TEXTS]))
    assert np.allclose(scores, [first @ other for other in others], atol=1e-6)
    assert scores.index(max(scores)) == 3


def test_long_prompts_are_refused_or_cut(mini):
    long = "word " * 400
    with pytest.raises(RequestError, match="256"):
        mini.embed(long)
    cut = mini.embed(long, truncate_prompt_tokens=-1)[0].prompt_token_ids
    assert (len(cut), cut[0], cut[-1]) == (256, 101, 102)


def test_what_the_model_does_not_do_is_refused(mini):
    with pytest.raises(RequestError, match="does not generate"):
        mini.generate("Hello")
    with pytest.raises(RequestError, match="task 'classify'"):
        mini.classify("Hello")
    with pytest.raises(RequestError, match="dimensions=500"):
        mini.embed("Hello", PoolingParams(dimensions=500))


def test_a_generating_model_gives_no_vectors_unless_it_is_asked_to_pool(tmp_path):
    from tiny_checkpoints import make

    model = make(tmp_path, "Llama")
    ids = [(11 * k + 17) % 120 + 5 for k in range(40)]
    settings = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "kv_cache_memory_bytes": 4 << 20}
    with LLM(str(tmp_path), **settings) as llm, pytest.raises(RequestError, match="--runner pooling"):
        llm.embed([ids])
    with torch.no_grad():
        want = torch.nn.functional.normalize(model.model(torch.tensor([ids])).last_hidden_state[0, -1], dim=-1)
    with LLM(str(tmp_path), runner="pooling", max_num_batched_tokens=16, **settings) as llm:
        first, again = llm.embed([ids])[0], llm.embed([ids])[0]
    assert (torch.tensor(first.outputs.embedding) - want).abs().max() < 1e-5
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 32)
    assert np.abs(np.array(again.outputs.embedding) - np.array(first.outputs.embedding)).max() < 1e-6


@pytest.mark.parametrize("kind", ["MEAN", "ALL", "CLS"])
def test_poolings_of_every_token_survive_chunks_and_take_nothing_from_earlier_prompts(tmp_path, kind):
    from tiny_checkpoints import make

    model = make(tmp_path, "Qwen3", head_dim=8)
    ids = [(11 * k + 17) % 120 + 5 for k in range(40)]
    with torch.no_grad():
        states = model.model(torch.tensor([ids])).last_hidden_state[0]
    want = {"MEAN": states.mean(0), "ALL": states, "CLS": states[0]}[kind]
    config = {"pooling_type": kind, "normalize": False}
    settings = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "kv_cache_memory_bytes": 4 << 20}
    with LLM(str(tmp_path), runner="pooling", pooler_config=config, max_num_batched_tokens=16, **settings) as llm:
        for _ in range(2):
            output = llm.encode([ids])[0]
            assert output.num_cached_tokens == 0
            assert np.abs(output.outputs.data - want.numpy()).max() < 1e-4
