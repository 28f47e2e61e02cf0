"""Reads a checkpoint's configuration by key and type, and remembers which keys were read: what nobody read is an error, not a guess."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from pagoda.hal.errors import ModelError

T, P = TypeVar("T"), ParamSpec("P")
MOST = {"layer": 10_000, "expert": 100_000, "position": 1 << 25, "ctx": 1 << 25, "": 1 << 31}
"""More than any model has, by what a key's name holds: a damaged number must not keep us busy."""

_HARMLESS = """
architectures auto_map model_type _name_or_path _model_name_or_path name_or_path transformers_version torch_dtype dtype use_cache
tokenizer_class task_specific_params bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id cls_token_id unk_token_id
mask_token_id initializer_range initializer_factor init_std init_method_std use_return_dict return_dict output_hidden_states
output_attentions torchscript attention_dropout hidden_dropout attn_pdrop embd_pdrop resid_pdrop dropout hidden_dropout_prob
attention_probs_dropout_prob classifier_dropout embedding_dropout residual_dropout attn_dropout resid_dropout embd_dropout mlp_dropout
ffn_dropout output_dropout pretraining_tp gradient_checkpointing use_flash_attention use_flash_attn attn_implementation _attn_implementation
_attn_implementation_autoset _flash_attn_2_enabled chunk_size_feed_forward id2label label2id problem_type finetuning_task is_encoder_decoder
is_decoder add_cross_attention output_router_logits router_aux_loss_coef router_jitter_noise aux_loss_alpha seq_aux eod_token_id
router_z_loss_coef quantization_config compression_config summary_activation summary_first_dropout summary_last_dropout
summary_proj_to_labels summary_type summary_use_proj layerdrop activation_dropout emb_pdrop embed_dropout encoder_layerdrop
decoder_layerdrop num_logits_to_keep max_length num_nextn_predict_layers
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Keys that change no number of inference, or that others read (`quantization_config`: the number formats)."""

_MISSING: Any = object()


def sensible(function: Callable[P, T]) -> Callable[P, T]:
    """What a checkpoint says may be anything: whatever code stumbles over is a `ModelError`."""

    @wraps(function)
    def checked(*arguments: P.args, **options: P.kwargs) -> T:
        try:
            return function(*arguments, **options)
        except (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ModelError(
                f"what the checkpoint says does not go together ({what}); fetch it again, or correct its config.json"
            ) from error

    return checked


class Config:
    """One (sub-)configuration.

    Args:
        values: the mapping, as in config.json.
        where: how messages call it.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self.values = values
        self.where = where
        self._read: set[str] = set()
        self._children: dict[str, Config] = {}

    def integer(self, *names: str, default: T = _MISSING) -> int | T:
        """The first of `names` that is set, as an int; `default` where none is. Raises `ModelError` on a missing or mistyped key."""
        value = self._typed(names, default, "an integer", lambda v: isinstance(v, int) and not isinstance(v, bool))
        most = next(most for part, most in MOST.items() if part in names[0])
        if isinstance(value, int) and not (1 if most == 1 << 25 else -1) <= value <= most:
            raise ModelError(f"{self.where}: {names[0]}={value} makes no sense; the most is {most}")
        return value

    def number(self, *names: str, default: T = _MISSING) -> float | T:
        value = self._typed(names, default, "a number", lambda v: isinstance(v, int | float) and not isinstance(v, bool))
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value

    def flag(self, *names: str, default: T = _MISSING) -> bool | T:
        return self._typed(names, default, "true or false", lambda v: isinstance(v, bool))

    def text(self, *names: str, default: T = _MISSING) -> str | T:
        return self._typed(names, default, "a string", lambda v: isinstance(v, str))

    def list(self, *names: str, kind: type | tuple[type, ...], default: T = _MISSING) -> tuple[Any, ...] | T:
        """A list whose items are all of `kind`, as a tuple."""
        value = self._typed(
            names, default, f"a list of {kind}", lambda v: isinstance(v, list | tuple) and all(isinstance(x, kind) for x in v)
        )
        return tuple(value) if isinstance(value, list) else value

    def child(self, name: str) -> Config | None:
        """A nested mapping, whose own unread keys count too; None where absent or null."""
        if name not in self._children:
            value = self._typed((name,), None, "a mapping", lambda v: isinstance(v, Mapping))
            if value is None:
                return None
            self._children[name] = Config(value, f"{self.where}: {name}")
        return self._children[name]

    def has(self, name: str) -> bool:
        """Whether `name` is set and not null; does not count as reading it."""
        return self.values.get(name) is not None

    def having(self, values: Mapping[str, Any]) -> Config:
        """The same with more values; what is read there counts as read here."""
        wider = Config({**self.values, **values}, self.where)
        wider._read, wider._children = self._read, self._children
        return wider

    def ignore(self, *names: str) -> None:
        """Count keys as read: the family knows that they change nothing."""
        self._read.update(names)

    def require(self, name: str, *allowed: Any, default: Any = _MISSING) -> None:
        """Read a key of which only some values are implemented. Raises `ModelError` for any other."""
        self._read.add(name)
        value = self.values.get(name)
        if value is None and default is not _MISSING:
            value = default
        if value not in allowed:
            raise ModelError(f"{self.where}: {name}={value!r} is not implemented; only {', '.join(map(repr, allowed))} is")

    def unread(self) -> tuple[str, ...]:
        """Keys that nobody read and that are not known to be harmless; null values say nothing and do not count."""
        own = (key for key, value in self.values.items() if value is not None and key not in self._read | HARMLESS)
        nested = (f"{name}.{key}" for name, child in self._children.items() for key in child.unread())
        return tuple(sorted((*own, *nested)))

    def finish(self) -> None:
        """Raises `ModelError` naming every key that was left unread."""
        unread = self.unread()
        if unread:
            raise ModelError(
                f"{self.where} has keys that this model type does not know: {', '.join(unread)}; a key that changes the"
                " computation must be read by the model's family, one that does not belongs in its list of harmless keys"
            )

    def _typed(self, names: Iterable[str], default: Any, kind: str, fits: Any) -> Any:
        names = tuple(names)
        self._read.update(names)
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if not fits(value):
                raise ModelError(f"{self.where}: {name} must be {kind}, found {value!r}")
            return value
        if default is _MISSING:
            raise ModelError(f"{self.where} lacks {' or '.join(names)}, which must be {kind}")
        return default
