"""Builds the embedded ``StableDiffusion3Pipeline``, untrained and offline: every part of the real one, but tiny.

The T5 encoder is there because an SD3 pipeline saved without one does not reload by itself.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any, Final

import torch
from diffusers import (
    AutoencoderTiny,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from rollout_service.models.embedded.world import ALL_PROMPTS, IMAGE_SIZE

CLIP_LENGTH: Final = 8  # start, at most four words of this world, end, and room for two more
T5_LENGTH: Final = 6  # at most four words, end, and room for one more
CLIP_WIDTH: Final = 32
JOINT_WIDTH: Final = 2 * CLIP_WIDTH  # the two CLIP encoders side by side, and T5

# The decoder passes latents through 3 tanh(x / 3). Latents a tenth as large go through unbent (to within 0.04 %).
_SCALING_FACTOR: Final = 10.0


def _words() -> list[str]:
    return sorted({word for prompt in ALL_PROMPTS for word in prompt.split()})


def _byte_pair_merges(words: list[str]) -> list[tuple[str, str]]:
    """Byte-pair encoding, run until each of the words is one token."""
    spellings = [[*word[:-1], f"{word[-1]}</w>"] for word in words]
    merges: list[tuple[str, str]] = []
    while pairs := Counter(pair for spelling in spellings for pair in itertools.pairwise(spelling)):
        left, right = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append((left, right))
        for spelling in spellings:
            for index in range(len(spelling) - 2, -1, -1):
                if spelling[index : index + 2] == [left, right]:
                    spelling[index : index + 2] = [left + right]
    return merges


def build_clip_tokenizer() -> CLIPTokenizer:
    """Byte-pair encoding in which each word of this world is one token; other text falls apart into letters."""
    # The tokenizer lowers its input, so the alphabet needs no capitals.
    letters = [letter for letter in map(chr, range(ord("!"), ord("~") + 1)) if not letter.isupper()]
    merges = _byte_pair_merges(_words())
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), *("".join(merge) for merge in merges)]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    # Its signature says list[str], but the tokenizers library beneath takes pairs.
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=CLIP_LENGTH)  # pyright: ignore[reportArgumentType]


def build_t5_tokenizer() -> T5Tokenizer:
    """Unigram tokenizer in which each word of this world is one token; other words are unknown."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((f"▁{word}", -2.0) for word in _words())]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=T5_LENGTH)


def _build_clip_encoder(tokenizer: Any) -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=CLIP_WIDTH,
            intermediate_size=4 * CLIP_WIDTH,
            projection_dim=CLIP_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=CLIP_LENGTH,
            hidden_act="gelu",
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def _build_t5_encoder(tokenizer: Any) -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=len(tokenizer),
            d_model=JOINT_WIDTH,
            d_kv=JOINT_WIDTH // 2,
            d_ff=JOINT_WIDTH,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.0,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def _set_identity(convolution: Any, scale: float, shift: float) -> None:
    """Make a 3x3 convolution compute ``scale * x + shift`` on the first three channels."""
    torch.nn.init.zeros_(convolution.weight)
    for channel in range(3):
        convolution.weight.data[channel, channel, 1, 1] = scale
    torch.nn.init.constant_(convolution.bias, shift)


def build_identity_vae() -> AutoencoderTiny:
    """An autoencoder at the scale 1 whose decoded image, [-1, 1], is the latent: the weights are set, not trained."""
    vae = AutoencoderTiny(
        encoder_block_out_channels=(3,),
        decoder_block_out_channels=(3,),
        num_encoder_blocks=(0,),
        num_decoder_blocks=(0,),
        latent_channels=3,
        scaling_factor=_SCALING_FACTOR,
        shift_factor=0.0,
    )
    # The encoder maps an image from [-1, 1] to [0, 1] first, the decoder maps from [0, 1] to [-1, 1] last.
    encoder_in, encoder_out = vae.encoder.layers
    _set_identity(encoder_in, scale=1.0, shift=0.0)
    _set_identity(encoder_out, scale=2 / _SCALING_FACTOR, shift=-1 / _SCALING_FACTOR)
    decoder_in, _relu, decoder_out = vae.decoder.layers  # the relu clamps to [0, ...), which the image allows
    _set_identity(decoder_in, scale=_SCALING_FACTOR / 2, shift=0.5)
    _set_identity(decoder_out, scale=1.0, shift=0.0)
    return vae


def _zero_gates_and_output(transformer: Any) -> None:
    """Let each block start as the identity and the output as zero, as DiT does: the loss falls faster."""
    gates = [block.norm1.linear for block in transformer.transformer_blocks]
    gates += [block.norm1_context.linear for block in transformer.transformer_blocks]
    for linear in (*gates, transformer.norm_out.linear, transformer.proj_out):
        torch.nn.init.zeros_(linear.weight)
        torch.nn.init.zeros_(linear.bias)


def build_pipeline(seed: int = 0) -> StableDiffusion3Pipeline:
    """The whole pipeline, float32 on the CPU, with untrained weights that depend on the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        clip_tokenizer, t5_tokenizer = build_clip_tokenizer(), build_t5_tokenizer()
        pipeline = StableDiffusion3Pipeline(
            transformer=SD3Transformer2DModel(
                sample_size=IMAGE_SIZE,
                patch_size=4,
                in_channels=3,
                out_channels=3,
                num_layers=4,
                attention_head_dim=32,
                num_attention_heads=3,
                joint_attention_dim=JOINT_WIDTH,
                caption_projection_dim=96,
                pooled_projection_dim=JOINT_WIDTH,
                pos_embed_max_size=IMAGE_SIZE // 4,
                qk_norm="rms_norm",
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
            vae=build_identity_vae(),  # pyright: ignore[reportArgumentType]
            text_encoder=_build_clip_encoder(clip_tokenizer),
            tokenizer=clip_tokenizer,
            text_encoder_2=_build_clip_encoder(clip_tokenizer),
            tokenizer_2=clip_tokenizer,
            text_encoder_3=_build_t5_encoder(t5_tokenizer),
            tokenizer_3=t5_tokenizer,
        )
    _zero_gates_and_output(pipeline.transformer)
    pipeline.set_progress_bar_config(disable=True)
    for module in (pipeline.transformer, pipeline.vae, *text_encoders(pipeline)):
        module.eval()
    return pipeline


def text_encoders(pipeline: StableDiffusion3Pipeline) -> tuple[torch.nn.Module, ...]:
    """The three text encoders of the pipeline."""
    return pipeline.text_encoder, pipeline.text_encoder_2, pipeline.text_encoder_3
