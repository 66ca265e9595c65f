"""Attention through a window against its definition, and the seams by which a model is told of it."""

import attention_definition as definition
import pytest
import torch
from small import tiny_llama
from tolerance import assert_close
from torch import Tensor, nn

from nestling.core.errors import ConfigError
from nestling.models.window import FULL, Reader, _Full, reader_of, use_window

IDS = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(0))
SCALED = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
SCALED |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


def read(model: nn.Module, ids: Tensor = IDS, **more: object) -> Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False, **more).logits


def defined(model: nn.Module, ids: Tensor = IDS, **how: object) -> Tensor:
    with torch.no_grad():
        return torch.stack([definition.logits(model, row, **how) for row in ids.tolist()])


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_the_definition_itself_is_the_model(family: str) -> None:
    model = definition.exact(tiny_llama(family))
    assert_close(read(model), defined(model))


@pytest.mark.parametrize(
    ("family", "window", "sinks"),
    [
        ("Llama", 1, 0), ("Llama", 1, 2), ("Llama", 3, 0), ("Llama", 3, 2), ("Llama", 7, 2), ("Llama", 3, 5),
        ("Llama", 12, 2), ("Llama", 40, 20), ("Qwen2", 3, 2), ("Qwen3", 3, 2),
    ],
)  # fmt: skip
def test_a_window_is_as_defined(family: str, window: int, sinks: int) -> None:
    model = definition.exact(tiny_llama(family))
    use_window(model, window=window, sinks=sinks)
    assert_close(read(model), defined(model, window=window, sinks=sinks))


@pytest.mark.parametrize("changes", [{}, {"rope_parameters": SCALED}, {"rope_parameters": YARN}], ids=str)
@pytest.mark.parametrize("window", [8, 10, 12, 50])
def test_a_stream_no_longer_than_window_and_sinks_is_read_as_by_the_base(window: int, changes: dict) -> None:
    """Up to there the first tokens stand where they stood, also where a rotation is stretched."""
    model = tiny_llama(**changes)
    expected = read(model)
    use_window(model, window=window, sinks=4)
    assert_close(read(model), expected)
    assert not torch.equal(read(model, IDS.repeat(1, 5)), IDS)  # and longer ones run


def test_a_shorter_one_is_not() -> None:
    model = tiny_llama()
    expected = read(model)
    use_window(model, window=7, sinks=4)
    got = read(model)
    assert_close(got[:, :11], expected[:, :11])
    assert not torch.allclose(got[:, 11], expected[:, 11], atol=1e-3)


def test_no_window_is_the_base_bit_for_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_llama().to(dtype)
        expected = read(model)
        reader = use_window(model, window=0)
        assert reader.sinks == 0
        assert torch.equal(read(model), expected)
        reader.remove()
        assert torch.equal(read(model), expected)


def test_float32_stays_near_the_definition_through_a_whole_layer() -> None:
    expected = defined(definition.exact(tiny_llama(num_hidden_layers=1)), window=3, sinks=2)
    model = tiny_llama(num_hidden_layers=1)
    use_window(model, window=3, sinks=2)
    assert_close(read(model), expected)


def test_a_model_may_be_moved_while_it_reads_through_a_window() -> None:
    model = tiny_llama()
    use_window(model, window=3, sinks=2)
    definition.exact(model)
    assert_close(read(model), defined(model, window=3, sinks=2))


def test_removing_it_leaves_no_trace() -> None:
    model = tiny_llama()
    settings, expected = model.config, read(model)
    kept = {name: dict(module.__dict__) for name, module in model.named_modules()}
    keys = list(model.state_dict())
    reader = use_window(model, window=3)
    assert reader_of(model) is reader
    assert list(model.state_dict()) == keys
    assert not torch.equal(read(model), expected)
    reader.remove()
    reader.remove()
    assert reader_of(model) is None
    assert torch.equal(read(model), expected)
    assert model.config is settings
    assert settings._attn_implementation == "sdpa"
    for name, module in model.named_modules():
        assert module.__dict__ == kept[name] | {"_modules": module._modules}
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._forward_hooks_always_called)
        assert not any(hooks)
    use_window(model, window=3).remove()


def test_another_model_of_the_same_settings_goes_on_as_it_did() -> None:
    model = tiny_llama()
    other = type(model)(model.config).eval()
    assert other.config is model.config
    expected = read(other)
    for window in (0, 3):
        reader = use_window(model, window=window)
        assert torch.equal(read(other), expected)
        reader.remove()


def test_models_that_attend_differently_do_not_meet() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def half(*args: object, **kwargs: object) -> tuple[Tensor, None]:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)[0] / 2, None

    AttentionInterface.register("tests-half", half)
    AttentionMaskInterface.register("tests-half", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    one, two = tiny_llama(), tiny_llama()
    two.config._attn_implementation = "tests-half"
    expected = read(one), read(two)
    assert not torch.equal(*expected)
    use_window(one, window=0)
    use_window(two, window=0)
    assert torch.equal(read(one), expected[0])
    assert torch.equal(read(two), expected[1])
    assert isinstance(ALL_ATTENTION_FUNCTIONS[f"{FULL}-tests-half"], _Full)


def test_what_is_refused() -> None:
    for other in (nn.Linear(2, 2), nn.Sequential(), nn.TransformerEncoderLayer(8, 2, 16)):
        with pytest.raises(ConfigError, match="no attention layers of the Llama family"):
            use_window(other, window=3)
    model = tiny_llama()
    use_window(model, window=3)
    with pytest.raises(ConfigError, match="already"):
        use_window(model, window=3)
    eager = tiny_llama()
    eager.config._attn_implementation = "eager"
    with pytest.raises(ConfigError, match="'eager'"):
        use_window(eager, window=0)
    assert reader_of(eager) is None
    assert eager.config._attn_implementation == "eager"
    use_window(eager, window=50)  # a window does without the model's own attention
    assert_close(read(eager), read(tiny_llama()))


@pytest.mark.parametrize("mask", [torch.ones(2, 1, 12, 12), torch.ones(2, 5), {"full_attention": None}], ids=type)
def test_masks_of_another_form_are_refused(mask: object) -> None:
    model = tiny_llama()
    reader = use_window(model, window=3)
    with pytest.raises(ConfigError, match="attention_mask"):
        read(model, attention_mask=mask)
    assert reader.rows is None
    assert reader.stream is None


def test_arguments_by_position_are_seen() -> None:
    model = tiny_llama()
    use_window(model, window=3)
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    with torch.no_grad():
        by_name = model.model(input_ids=IDS, attention_mask=mask).last_hidden_state
        assert torch.equal(model.model(IDS, mask).last_hidden_state, by_name)
        assert not torch.equal(model.model(IDS).last_hidden_state, by_name)
        assert torch.equal(model(inputs_embeds=model.model.embed_tokens(IDS)).logits, read(model))


def test_gradient_checkpointing_is_refused_while_training() -> None:
    model = tiny_llama()
    reader = use_window(model, window=3)
    model.gradient_checkpointing_enable()
    read(model.eval())
    with pytest.raises(ConfigError, match="activation checkpointing"):
        model.train()(IDS)
    assert isinstance(reader, Reader)
    model.gradient_checkpointing_disable()
    model(IDS)


OTHERS = {
    "Gemma2": {"query_pre_attn_scalar": 8},  # caps its scores
    "GptOss": {"num_local_experts": 2, "num_experts_per_tok": 1},  # has sinks of its own
    "SmolLM3": {"pad_token_id": 0},  # some layers do not rotate
    "Cohere": {},  # turns pairs of neighbours
    "Glm": {"pad_token_id": 0},  # rotates half of a head
}


@pytest.mark.parametrize("family", OTHERS)
def test_a_model_that_only_looks_alike_is_refused(family: str) -> None:
    import transformers

    sizes = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "head_dim": 8}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 64, "bos_token_id": None, "eos_token_id": None}
    settings = getattr(transformers, f"{family}Config")(**(sizes | OTHERS[family]))
    model = getattr(transformers, f"{family}ForCausalLM")(settings)
    with pytest.raises(ConfigError, match="no attention layers of the Llama family"):
        use_window(model, window=8)


@pytest.mark.parametrize(
    ("family", "changes", "most"),
    [
        ("Llama", {}, 64),
        ("Mistral", {"sliding_window": 8}, 8),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, 8),
        ("Qwen3", {"use_sliding_window": False, "sliding_window": 8}, 64),
    ],
)
def test_a_window_shows_no_more_than_the_model_itself_would_see(family: str, changes: dict, most: int) -> None:
    model = tiny_llama(family, **changes)
    with pytest.raises(ConfigError, match=f"model's {most}"):
        use_window(model, window=most - 1, sinks=2)
    assert reader_of(model) is None
    expected = read(model)
    reader = use_window(model, window=most - 2, sinks=2)
    if most == 64:
        assert_close(read(model), expected)
    reader.remove()
    use_window(model, window=0)
    assert torch.equal(read(model), expected)


@pytest.mark.parametrize("padded", [0, 4, 11])
def test_generated_token_by_token_is_as_read_at_once_after_padding_too(padded: int) -> None:
    """All layers of a pass share what a further token needs, and no pass what another needed."""
    model = definition.exact(tiny_llama())
    use_window(model, window=3, sinks=2)
    mask = torch.ones_like(IDS)
    mask[1, :padded] = 0
    with torch.no_grad():
        told = {"return_dict_in_generate": True, "output_logits": True, "pad_token_id": 0, "eos_token_id": None}
        made = model.generate(IDS, attention_mask=mask, max_new_tokens=7, do_sample=False, **told)
    got = torch.stack(made.logits, 1)
    for row, start in ((0, 0), (1, padded)):
        whole = defined(model, made.sequences[row : row + 1, start:], window=3, sinks=2)[0]
        assert_close(got[row], whole[-8:-1])
