"""Encoders and classifiers against transformers on tiny random checkpoints, alone and beside others; pairs have their token types."""

import json

import numpy as np
import pytest
import torch
from frontend_samples import byte_level
from pagoda import LLM, PoolingParams
from pagoda.hal.errors import ConfigError, ModelError, RequestError
from tiny_checkpoints import make

ROPES = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in (("sliding_attention", 1e4), ("full_attention", 1.6e5))}
DISTIL = {"dim": 32, "n_heads": 4, "hidden_dim": 48, "n_layers": 2}
BOTH = {"use_bidirectional_attention": True, "sliding_window": 8, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]}
CASES = {
    "Bert": {"type_vocab_size": 3},
    "Roberta": {"pad_token_id": 1, "type_vocab_size": 1},
    "Electra": {"embedding_size": 24},
    "Ernie": {},
    "MegatronBert": {},
    "RobertaPreLayerNorm": {"pad_token_id": 1},
    "XLMRobertaXL": {"pad_token_id": 1},
    "DistilBert": DISTIL,
    "MPNet": {"pad_token_id": 1},
    "ModernBert": {"local_attention": 16, "layer_types": [*ROPES], "rope_parameters": ROPES, "norm_bias": True, "mlp_bias": True},
    "NomicBert": {"head_dim": 8},
    "Gte": {},
    "JinaEmbeddingsV3": {},
    "EuroBert": {"head_dim": 8},
}
SETTINGS = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 4 << 20}
PROMPTS = [[(11 * k + 17 * n) % 120 + 5 for k in range(n)] for n in (1, 9, 40)]


def states(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).last_hidden_state[0].float().numpy()


@pytest.mark.parametrize("name", CASES)
def test_hidden_states_are_those_of_transformers(tmp_path, name):
    model = make(tmp_path, f"{name}Model", **CASES[name])
    with LLM(str(tmp_path), pooler_config={"pooling_type": "ALL", "normalize": False}, skip_tokenizer_init=True, **SETTINGS) as llm:
        for output, ids in zip(llm.encode(PROMPTS), PROMPTS, strict=True):
            assert np.abs(output.outputs.data - states(model, ids)).max() < 2e-5


def test_gemma_in_both_directions(tmp_path):
    model = make(tmp_path, "Gemma3TextModel", query_pre_attn_scalar=16, **BOTH)
    with LLM(str(tmp_path), pooler_config={"pooling_type": "MEAN"}, skip_tokenizer_init=True, **SETTINGS) as llm:
        got = np.array(llm.embed(PROMPTS[2])[0].outputs.embedding)
    want = states(model, PROMPTS[2]).mean(0)
    assert np.abs(got - want / np.linalg.norm(want)).max() < 1e-5


@pytest.mark.parametrize("name", ["Bert", "Roberta", "Electra", "DistilBert", "MPNet", "ModernBert", "NomicBert", "Gte", "Llama", "Qwen3"])
@pytest.mark.parametrize("whole", [True, False])
def test_scores_are_those_of_transformers(tmp_path, name, whole):
    labels = {"id2label": {0: "bad", 1: "good", 2: "so so"}, "label2id": {"bad": 0, "good": 1, "so so": 2}}
    kind = f"{name}For{'Sequence' if whole else 'Token'}Classification"
    model = make(tmp_path, kind, **{**CASES.get(name, {}), **labels})
    with torch.no_grad():
        logits = [model(torch.tensor([ids])).logits[0].float() for ids in PROMPTS]
    with LLM(str(tmp_path), skip_tokenizer_init=True, **SETTINGS) as llm:
        for output, want in zip(llm.encode(PROMPTS), logits, strict=True):
            assert np.abs(output.outputs.data - want.softmax(-1).numpy()).max() < 1e-5
        raw = llm.encode(PROMPTS, PoolingParams(use_activation=False))
        assert all(np.abs(output.outputs.data - want.numpy()).max() < 5e-5 for output, want in zip(raw, logits, strict=True))
        if whole:
            assert llm.classify(PROMPTS[0])[0].outputs.labels == ("bad", "good", "so so")
        else:
            assert llm.reward(PROMPTS[2])[0].outputs.data.shape == (40, 3)


def test_a_cross_encoder_sees_which_text_is_the_second(tmp_path):
    tokenizer = byte_level()
    vocabulary = tokenizer.get_vocab_size()
    model = make(tmp_path, "BertForSequenceClassification", vocab_size=vocabulary, id2label={0: "score"}, label2id={"score": 0})
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = ["one", "another text", "x"]
    with LLM(str(tmp_path), **SETTINGS) as llm:
        outputs = llm.score("a question", texts)
        with pytest.raises(RequestError, match="no pairs"):
            llm.score(["a", "b"], texts)
    for text, output in zip(texts, outputs, strict=True):
        encoded = tokenizer.encode("a question", text)
        assert output.prompt_token_ids == encoded.ids
        with torch.no_grad():
            logit = model(torch.tensor([encoded.ids]), token_type_ids=torch.tensor([encoded.type_ids])).logits[0, 0]
        assert output.outputs.score == pytest.approx(float(torch.sigmoid(logit)), abs=1e-5)
        assert 1 in encoded.type_ids


def test_modules_of_sentence_transformers_are_read(tmp_path):
    from safetensors.torch import save_file

    model = make(tmp_path, "BertModel")
    modules = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense", "Normalize": "3_Normalize"}
    listed = [{"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"} for i, (kind, path) in enumerate(modules.items())]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 32}))
    for folder in ("1_Pooling", "2_Dense"):
        (tmp_path / folder).mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, "pooling_mode_lasttoken": True}))
    dense = {"in_features": 32, "out_features": 8, "bias": True, "activation_function": "torch.nn.modules.activation.Tanh"}
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps(dense))
    weight, bias = torch.randn(8, 32), torch.randn(8)
    save_file({"linear.weight": weight, "linear.bias": bias}, tmp_path / "2_Dense" / "model.safetensors")
    with LLM(str(tmp_path), skip_tokenizer_init=True, **SETTINGS) as llm:
        got = np.array(llm.embed(PROMPTS[1])[0].outputs.embedding)
        with pytest.raises(RequestError, match="length is 32"):
            llm.embed(PROMPTS[2])
    want = torch.tanh(weight @ torch.from_numpy(states(model, PROMPTS[1])[-1]) + bias)
    assert np.abs(got - torch.nn.functional.normalize(want, dim=-1).numpy()).max() < 1e-5


def test_a_vector_for_each_token_by_late_interaction(tmp_path):
    from safetensors.torch import load_file, save_file

    tokenizer = byte_level()
    model = make(tmp_path, "BertModel", vocab_size=tokenizer.get_vocab_size())
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"], "dim": 8}))
    tensors = {f"bert.{name}": tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    weight, texts = torch.randn(8, 32), ("a question", "an answer")
    save_file({**tensors, "linear.weight": weight}, tmp_path / "model.safetensors")
    with LLM(str(tmp_path), **SETTINGS) as llm:
        got = [output.outputs.data for output in llm.encode(list(texts))]
        (scored,) = llm.score(*texts)
    want = [torch.from_numpy(states(model, tokenizer.encode(text).ids)) @ weight.T for text in texts]
    query, document = (torch.nn.functional.normalize(vectors, dim=-1).numpy() for vectors in want)
    assert np.abs(got[0] - query).max() < 1e-5 and np.abs(got[1] - document).max() < 1e-5
    assert scored.outputs.score == pytest.approx(float((query @ document.T).max(1).sum()), abs=1e-5)


def test_process_rewards_come_for_the_tagged_tokens(tmp_path):
    from safetensors.torch import load_file, save_file

    model = make(tmp_path, "Qwen2Model", head_dim=8)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen2ForProcessRewardModel"]}))
    first, second = (torch.randn(32, 32), torch.randn(32)), (torch.randn(2, 32), torch.randn(2))
    named = {f"score.{place}.{kind}": value for place, pair in ((0, first), (2, second)) for kind, value in zip(("weight", "bias"), pair)}
    tensors = {f"model.{name}": tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file({**tensors, **named}, tmp_path / "model.safetensors")
    ids = [7, 50, 8, 9, 50, 10]
    hidden = torch.from_numpy(states(model, ids))[[1, 4]]
    want = (torch.relu(hidden @ first[0].T + first[1]) @ second[0].T + second[1]).softmax(-1)[:, 1:]
    config = {"step_tag_id": 50, "returned_token_ids": None}
    with LLM(str(tmp_path), pooler_config=config, skip_tokenizer_init=True, **SETTINGS) as llm:
        got = llm.reward([ids])[0].outputs.data
    assert np.abs(got[:, 1:] - want.numpy()).max() < 1e-5


def test_what_does_not_go_together_is_refused(tmp_path):
    make(tmp_path, "BertModel")
    with pytest.raises(ConfigError, match="cannot generate"):
        LLM(str(tmp_path), runner="generate", skip_tokenizer_init=True, **SETTINGS)
    with pytest.raises(ConfigError, match="pooling type 'MAX'"):
        LLM(str(tmp_path), pooler_config={"pooling_type": "MAX"}, skip_tokenizer_init=True, **SETTINGS)
    other = tmp_path / "eurobert"
    other.mkdir()
    make(other, "EuroBertForSequenceClassification", head_dim=8)
    with pytest.raises(ModelError, match="late"):
        LLM(str(other), skip_tokenizer_init=True, model_impl="pagoda", **SETTINGS)
