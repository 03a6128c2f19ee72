"""Real diffusers pipelines with tiny random weights, built fully offline.

Every builder returns a genuine pipeline of its family (denoiser, VAE, text encoders, tokenizers, scheduler),
so that tests and server processes run the same code as with the released checkpoints: the latent layouts, the
conditioning inputs, the scheduler settings and the compression factors of the VAEs (8 in space, 4 in time)
are those of the real models; only widths and depths are small.

The weights are random but not degenerate: the velocity has a standard deviation of about 0.5 and depends on
the latents, on the timestep and on the prompt, and sampling stays finite in float32, bfloat16 and float16.

Qwen-Image's real settings have a limit of their own: a schedule of one step divides zero by zero.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers.pre_tokenizers import ByteLevel
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

ModuleT = TypeVar("ModuleT", bound=nn.Module)

SEED = 0
WIDTH = 32
"""Width of every text encoder and denoiser."""
HEADS = 2
HEAD_WIDTH = WIDTH // HEADS
ROPE_AXES = (4, 6, 6)
"""Rotary widths of the three axes of Flux and Qwen-Image: even, and summing to HEAD_WIDTH."""
LATENT_CHANNELS = 16
VIDEO_VAE_SIZES: dict[str, Any] = {
    "base_dim": 8,
    "dim_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "z_dim": LATENT_CHANNELS,
}
"""Sizes of the VAEs of Wan and Qwen-Image, which are one architecture under two names."""
CLIP_LENGTH = 77
QWEN_TEMPLATE_WORDS = (
    "system\nuser\nassistant\nDescribe the image by detailing the color, shape, size, texture, quantity,"
    " text, spatial relationships of the objects and background"
)
"""The words of Qwen-Image's prompt template."""


@dataclass(frozen=True)
class Family:
    """A model family: how to build its tiny pipeline, and how to call it cheaply.

    `call_arguments` leaves out the prompts and the number of steps. Qwen-Image runs its guidance only if it
    is also given a `negative_prompt`.
    """

    name: str
    build: Callable[[], DiffusionPipeline]
    call_arguments: Mapping[str, Any]
    latent_note: str


def build_sd3() -> StableDiffusion3Pipeline:
    """Stable Diffusion 3: two CLIP encoders and a T5 encoder, guidance in one call of twice the size."""
    with _fixed_seed():
        clip_tokenizers = [_clip_tokenizer(), _clip_tokenizer()]
        clip_encoders = [
            _randomised(CLIPTextModelWithProjection(_clip_config(tokenizer))) for tokenizer in clip_tokenizers
        ]
        t5_tokenizer = _t5_tokenizer()
        transformer = SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            num_layers=2,
            attention_head_dim=HEAD_WIDTH,
            num_attention_heads=HEADS,
            # The pipeline pads the two CLIP embeddings, side by side, to the width of the T5 one.
            joint_attention_dim=2 * WIDTH,
            caption_projection_dim=WIDTH,
            pooled_projection_dim=2 * WIDTH,
            pos_embed_max_size=16,
            qk_norm="rms_norm",
        )
        return StableDiffusion3Pipeline(
            transformer=_denoiser(transformer),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=_image_vae(scaling_factor=1.5305, shift_factor=0.0609),
            text_encoder=clip_encoders[0],
            tokenizer=clip_tokenizers[0],
            text_encoder_2=clip_encoders[1],
            tokenizer_2=clip_tokenizers[1],
            text_encoder_3=_t5_encoder(t5_tokenizer, width=2 * WIDTH),
            tokenizer_3=t5_tokenizer,
        )


def build_flux(guidance_embeds: bool = True) -> FluxPipeline:
    """Flux: packed latents and, with `guidance_embeds`, the distilled guidance scale as a denoiser input."""
    with _fixed_seed():
        clip_tokenizer, t5_tokenizer = _clip_tokenizer(), _t5_tokenizer()
        transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=4 * LATENT_CHANNELS,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=HEAD_WIDTH,
            num_attention_heads=HEADS,
            joint_attention_dim=WIDTH,
            pooled_projection_dim=WIDTH,
            guidance_embeds=guidance_embeds,
            axes_dims_rope=ROPE_AXES,
        )
        return FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
            vae=_image_vae(scaling_factor=0.3611, shift_factor=0.1159),
            text_encoder=_randomised(CLIPTextModel(_clip_config(clip_tokenizer))),
            tokenizer=clip_tokenizer,
            text_encoder_2=_t5_encoder(t5_tokenizer, width=WIDTH),
            tokenizer_2=t5_tokenizer,
            transformer=_denoiser(transformer),
        )


def build_qwen_image() -> QwenImagePipeline:
    """Qwen-Image: packed latents, a Qwen2.5-VL text encoder, guidance in two denoiser calls."""
    with _fixed_seed():
        tokenizer = _qwen_tokenizer()
        transformer = QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=4 * LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            num_layers=2,
            attention_head_dim=HEAD_WIDTH,
            num_attention_heads=HEADS,
            joint_attention_dim=WIDTH,
            axes_dims_rope=ROPE_AXES,
        )
        scheduler = FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
        )
        return QwenImagePipeline(
            scheduler=scheduler,
            vae=_randomised(AutoencoderKLQwenImage(**VIDEO_VAE_SIZES)),
            text_encoder=_qwen_encoder(tokenizer),
            tokenizer=tokenizer,
            transformer=_denoiser(transformer),
        )


def build_wan(unipc: bool = False) -> WanPipeline:
    """Wan text to video, with the Euler scheduler or, with `unipc`, the released checkpoints' own."""
    with _fixed_seed():
        tokenizer = _t5_tokenizer()
        transformer = WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=HEADS,
            attention_head_dim=HEAD_WIDTH,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            text_dim=WIDTH,
            ffn_dim=2 * WIDTH,
            num_layers=2,
            rope_max_seq_len=64,
        )
        if unipc:
            scheduler = UniPCMultistepScheduler(
                prediction_type="flow_prediction",
                use_flow_sigmas=True,
                flow_shift=3.0,
            )
        else:
            scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
        return WanPipeline(
            tokenizer=tokenizer,
            text_encoder=_randomised(UMT5EncoderModel(UMT5Config(**_t5_sizes(tokenizer, WIDTH)))),
            vae=_randomised(AutoencoderKLWan(**VIDEO_VAE_SIZES)),
            scheduler=scheduler,
            transformer=_denoiser(transformer),
        )


# Heights and widths differ so that a test notices when the two are mixed up.
_IMAGE_SIZE = {"height": 64, "width": 48}

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            name="sd3",
            build=build_sd3,
            call_arguments={**_IMAGE_SIZE, "guidance_scale": 4.5, "max_sequence_length": 64},
            latent_note="spatial: (images, 16, height / 8, width / 8), dtype of the text encoders",
        ),
        Family(
            name="flux",
            build=build_flux,
            call_arguments={**_IMAGE_SIZE, "guidance_scale": 3.5, "max_sequence_length": 64},
            latent_note="packed 2x2: (images, height / 16 * width / 16, 64), dtype of the text encoders",
        ),
        Family(
            name="qwen_image",
            build=build_qwen_image,
            call_arguments={**_IMAGE_SIZE, "true_cfg_scale": 4.0},
            latent_note="packed 2x2: (images, height / 16 * width / 16, 64), dtype of the text encoder",
        ),
        Family(
            name="wan",
            build=build_wan,
            call_arguments={
                "height": 32,
                "width": 48,
                "num_frames": 5,
                "guidance_scale": 5.0,
                "max_sequence_length": 64,
            },
            latent_note="(videos, 16, (num_frames - 1) / 4 + 1, height / 8, width / 8), initially float32",
        ),
    )
}


def save_pipeline(pipe: DiffusionPipeline, directory: str | Path) -> Path:
    """Write the pipeline to a directory that `DiffusionPipeline.from_pretrained` loads."""
    directory = Path(directory)
    pipe.save_pretrained(directory)
    return directory


@contextmanager
def _fixed_seed() -> Iterator[None]:
    """Draw the same weights at every build, and leave the caller's random state as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        yield


def _randomised(module: ModuleT) -> ModuleT:
    """Redraw the weights so that every layer passes on signals of the order of one, and set eval mode.

    The libraries' own initialisations are made for training: some are so small (std 0.02) that a shallow and
    narrow network hardly reacts to its inputs, others (zero projections) not at all.
    """
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, (nn.Linear, nn.Conv2d, nn.Conv3d)):
                nn.init.normal_(layer.weight, std=layer.weight[0].numel() ** -0.5)
                if layer.bias is not None:
                    nn.init.normal_(layer.bias, std=0.1)
            elif isinstance(layer, nn.Embedding):
                nn.init.normal_(layer.weight)
    return module.eval()


def _denoiser(transformer: ModuleT) -> ModuleT:
    """Randomise a denoiser, and halve its outputs so that strong guidance does not blow the latents up."""
    _randomised(transformer).proj_out.weight.data.mul_(0.5)
    return transformer


def _image_vae(scaling_factor: float, shift_factor: float) -> AutoencoderKL:
    """The image VAE of SD3 and Flux, which differ in the normalisation of the latents only."""
    return _randomised(
        AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(8,) * 4,
            norm_num_groups=4,
            latent_channels=LATENT_CHANNELS,
            scaling_factor=scaling_factor,
            shift_factor=shift_factor,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )
    )


def _vocabulary(tokens: Iterable[str]) -> dict[str, int]:
    """Number the tokens."""
    return {token: index for index, token in enumerate(tokens)}


def _clip_tokenizer() -> CLIPTokenizer:
    """A CLIP tokenizer that gives one token per byte, the last of a word marked as such."""
    characters = sorted(ByteLevel.alphabet())
    endings = [character + "</w>" for character in characters]
    vocabulary = _vocabulary([*characters, *endings, "<|startoftext|>", "<|endoftext|>"])
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=CLIP_LENGTH)


def _clip_config(tokenizer: CLIPTokenizer) -> CLIPTextConfig:
    """A CLIP text encoder for that tokenizer; the pooled output is read at its end-of-text token."""
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        projection_dim=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        max_position_embeddings=CLIP_LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _t5_tokenizer() -> T5Tokenizer:
    """A T5 tokenizer that gives one token per printable ASCII character, and `<unk>` for any other."""
    special = [(token, 0.0) for token in ("<pad>", "</s>", "<unk>")]
    characters = "▁" + string.digits + string.ascii_letters + string.punctuation
    return T5Tokenizer(vocab=[*special, *((character, -1.0) for character in characters)], extra_ids=0)


def _t5_sizes(tokenizer: T5Tokenizer, width: int) -> dict[str, Any]:
    """The settings shared by the T5 and UMT5 encoders."""
    return {
        "vocab_size": len(tokenizer),
        "d_model": width,
        "d_kv": HEAD_WIDTH,
        "d_ff": 2 * WIDTH,
        "num_layers": 2,
        "num_heads": HEADS,
        "feed_forward_proj": "gated-gelu",
    }


def _t5_encoder(tokenizer: T5Tokenizer, width: int) -> T5EncoderModel:
    """A T5 encoder whose outputs have the given width."""
    return _randomised(T5EncoderModel(T5Config(**_t5_sizes(tokenizer, width))))


def _qwen_tokenizer() -> Qwen2Tokenizer:
    """A Qwen2 tokenizer that gives one token per byte, but one per word of the prompt template.

    The pipeline drops the first 34 tokens: the system message as the real tokenizer splits it. Were its words
    split into bytes, most of the message would stay in front of every prompt and drown it.
    """
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = [word for word, _ in ByteLevel(add_prefix_space=False).pre_tokenize_str(QWEN_TEMPLATE_WORDS)]
    # Each merge lengthens the beginning of a word by one character. The dict removes the repeated ones.
    merges = list(dict.fromkeys((word[:end], word[end]) for word in words for end in range(1, len(word))))
    vocabulary = _vocabulary([*sorted(ByteLevel.alphabet()), *map("".join, merges), *special])
    return Qwen2Tokenizer(vocab=vocabulary, merges=merges, extra_special_tokens=special[1:])


def _qwen_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    """A Qwen2.5-VL text encoder for that tokenizer; its vision part is there, but is never run."""
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "max_position_embeddings": 2048,
            # Half a head's width, shared out between time, height and width.
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
            "bos_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 1,
            "hidden_size": WIDTH,
            "intermediate_size": WIDTH,
            "num_heads": HEADS,
            "out_hidden_size": WIDTH,
            "fullatt_block_indexes": [0],
        },
    )
    return _randomised(Qwen2_5_VLForConditionalGeneration(config))
