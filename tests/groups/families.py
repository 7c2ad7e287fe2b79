"""Small models of many families on ``meta``, and handwritten tables that sort each of their parameters.

`Family.matrices` has the group keys that say how a parameter is read, by patterns of names. All others are
not matrices.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

Keys = dict[str, Any]

PLAIN: Keys = {}
KERNEL: Keys = {"flatten": True}
TURNED: Keys = {"fan_in_fan_out": True}


def rows(*sizes: int) -> Keys:
    return {"split_sizes": sizes}


def columns(*sizes: int) -> Keys:
    """Cut along the columns of weights that are stored ``[in, out]``."""
    return {"split_sizes": sizes, "split_dim": 1, "fan_in_fan_out": True}


@dataclass(frozen=True)
class Family:
    """A model and its matrices."""

    name: str
    library: str
    make: Callable[[Any], nn.Module]
    matrices: dict[str, Keys]
    rest: tuple[str, ...]
    """Patterns of parameters of two dimensions and more that are no matrices: all of them."""

    def __str__(self) -> str:
        return self.name

    def build(self) -> nn.Module:
        """The model on ``meta``; skips where its library is missing."""
        if os.environ.get("OXIDION_REQUIRE_FRAMEWORKS"):
            library = importlib.import_module(self.library)
        else:
            library = pytest.importorskip(self.library, exc_type=ImportError)
        with torch.device("meta"):
            return self.make(library)


LLM: Keys = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
BERT: Keys = {key: value for key, value in LLM.items() if key != "num_key_value_heads"}
ONE: Keys = {"num_hidden_layers": 1}
TOKENS = ("cls_token", "pos_embed")
LLAMA_ATTENTION = {f"model.layers.*.self_attn.{name}_proj.weight": PLAIN for name in "qkvo"}
LLAMA_MLP = {f"model.layers.*.mlp.{name}_proj.weight": PLAIN for name in ("gate", "up", "down")}
EMBEDDED = ("model.embed_tokens.weight", "lm_head.weight")
BERT_LAYERS = {
    "*.attention.self.query*.weight": PLAIN,
    "*.attention.self.key*.weight": PLAIN,
    "*.attention.self.value*.weight": PLAIN,
    "*.attention.output.dense.weight": PLAIN,
    "*.intermediate.dense.weight": PLAIN,
    "*.layer.*.output.dense.weight": PLAIN,
}
VIT_BLOCKS = {
    "patch_embed.proj.weight": KERNEL,
    "blocks.*.attn.qkv.weight": rows(192, 192, 192),
    "blocks.*.attn.proj.weight": PLAIN,
    "blocks.*.mlp.fc?.weight": PLAIN,
}


def causal(config: str, **settings: Any) -> Callable[[Any], nn.Module]:
    """A causal language model of transformers."""
    return lambda t: t.AutoModelForCausalLM.from_config(getattr(t, config)(**settings))


def of(model: str, config: str, **settings: Any) -> Callable[[Any], nn.Module]:
    """Another model of transformers."""
    return lambda t: getattr(t, model)(getattr(t, config)(**settings))


def timm(name: str, **settings: Any) -> Callable[[Any], nn.Module]:
    return lambda t: t.create_model(name, **settings)


def vision(name: str, **settings: Any) -> Callable[[Any], nn.Module]:
    return lambda v: getattr(v, name)(**settings)


MOE = {**LLM, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16}

TRANSFORMERS = [
    Family("llama", "transformers", causal("LlamaConfig", **LLM), {**LLAMA_ATTENTION, **LLAMA_MLP}, EMBEDDED),
    Family(
        "mixtral",
        "transformers",
        causal("MixtralConfig", **LLM, num_local_experts=4),
        {
            **LLAMA_ATTENTION,
            "model.layers.*.mlp.experts.gate_up_proj": rows(96, 96),
            "model.layers.*.mlp.experts.down_proj": PLAIN,
        },
        (*EMBEDDED, "model.layers.*.mlp.gate.weight"),
    ),
    Family(
        "qwen3-moe",
        "transformers",
        causal("Qwen3MoeConfig", **MOE),
        {
            **LLAMA_ATTENTION,
            "model.layers.*.mlp.experts.gate_up_proj": rows(48, 48),
            "model.layers.*.mlp.experts.down_proj": PLAIN,
        },
        (*EMBEDDED, "model.layers.*.mlp.gate.weight"),
    ),
    Family(
        "qwen3-next",
        "transformers",
        causal(
            "Qwen3NextConfig",
            **MOE,
            shared_expert_intermediate_size=48,
            layer_types=["linear_attention", "full_attention"],
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
        ),
        {
            **LLAMA_ATTENTION,
            "model.layers.*.linear_attn.in_proj_*.weight": PLAIN,
            "model.layers.*.linear_attn.out_proj.weight": PLAIN,
            "model.layers.*.mlp.experts.gate_up_proj": rows(48, 48),
            "model.layers.*.mlp.experts.down_proj": PLAIN,
            "model.layers.*.mlp.shared_expert.*_proj.weight": PLAIN,
        },
        (
            *EMBEDDED,
            "model.layers.*.mlp.gate.weight",
            "model.layers.*.mlp.shared_expert_gate.weight",
            "model.layers.*.linear_attn.conv1d.weight",
        ),
    ),
    Family(
        "deepseek-v3",
        "transformers",
        causal(
            "DeepseekV3Config",
            **{**LLM, "num_key_value_heads": 4},
            n_routed_experts=4,
            moe_intermediate_size=48,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            kv_lora_rank=16,
            q_lora_rank=24,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            first_k_dense_replace=1,
        ),
        {
            "*.self_attn.q_?_proj.weight": PLAIN,
            "*.self_attn.kv_a_proj_with_mqa.weight": rows(16, 8),
            "*.self_attn.kv_b_proj.weight": PLAIN,
            "*.self_attn.o_proj.weight": PLAIN,
            "model.layers.0.mlp.*_proj.weight": PLAIN,
            "model.layers.1.mlp.shared_experts.*_proj.weight": PLAIN,
            "model.layers.1.mlp.experts.gate_up_proj": rows(48, 48),
            "model.layers.1.mlp.experts.down_proj": PLAIN,
        },
        (*EMBEDDED, "model.layers.1.mlp.gate.weight"),
    ),
    Family(
        "gpt-oss",
        "transformers",
        causal("GptOssConfig", **LLM, num_local_experts=4, head_dim=16),
        {
            **LLAMA_ATTENTION,
            # Columns of gate and value alternate.
            "model.layers.*.mlp.experts.gate_up_proj": TURNED,
            "model.layers.*.mlp.experts.down_proj": TURNED,
        },
        (*EMBEDDED, "model.layers.*.mlp.router.weight", "model.layers.*.mlp.experts.*_bias"),
    ),
    Family(
        "llama4",
        "transformers",
        causal("Llama4TextConfig", **LLM, intermediate_size_mlp=96, num_local_experts=4, head_dim=16),
        {
            **LLAMA_ATTENTION,
            "model.layers.*.feed_forward.experts.gate_up_proj": columns(96, 96),
            "model.layers.*.feed_forward.experts.down_proj": TURNED,
            "model.layers.*.feed_forward.shared_expert.*_proj.weight": PLAIN,
        },
        (*EMBEDDED, "model.layers.*.feed_forward.router.weight"),
    ),
    Family(
        "dbrx",
        "transformers",
        causal(
            "DbrxConfig",
            d_model=64,
            n_heads=4,
            n_layers=1,
            vocab_size=128,
            bos_token_id=1,
            eos_token_id=2,
            ffn_config={"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
            attn_config={"kv_n_heads": 2, "rope_theta": 10000.0},
        ),
        {
            "*.attn.Wqkv.weight": rows(64, 32, 32),
            "*.attn.out_proj.weight": PLAIN,
            "*.experts.mlp.w1": {"num_heads": 4},
            "*.experts.mlp.v1": {"num_heads": 4},
            "*.experts.mlp.w2": {"num_heads": 4, "fan_in_fan_out": True},
        },
        ("transformer.wte.weight", "lm_head.weight", "*.router.layer.weight"),
    ),
    Family(
        "granite-moe",
        "transformers",
        causal("GraniteMoeConfig", **LLM, num_local_experts=4, num_experts_per_tok=2),
        {
            **LLAMA_ATTENTION,
            "*.block_sparse_moe.experts.gate_up_proj": rows(96, 96),
            "*.block_sparse_moe.experts.down_proj": PLAIN,
        },
        (*EMBEDDED, "*.block_sparse_moe.router.weight"),
    ),
    Family(
        "switch-transformer",
        "transformers",
        of(
            "SwitchTransformersForConditionalGeneration",
            "SwitchTransformersConfig",
            vocab_size=128,
            d_model=64,
            d_kv=16,
            d_ff=96,
            num_layers=2,
            num_decoder_layers=2,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            num_heads=4,
            num_experts=4,
        ),
        {
            "*Attention.?.weight": PLAIN,
            "*.mlp.w?.weight": PLAIN,
            "*.experts.expert_?.w?.weight": PLAIN,
        },
        ("shared.weight", "lm_head.weight", "*.relative_attention_bias.weight", "*.router.classifier.weight"),
    ),
    Family(
        "gpt2",
        "transformers",
        causal("GPT2Config", vocab_size=128, n_embd=64, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2),
        {
            "*.attn.c_attn.weight": columns(64, 64, 64),
            "*.attn.c_proj.weight": TURNED,
            "*.mlp.c_*.weight": TURNED,
        },
        ("transformer.wte.weight", "transformer.wpe.weight"),
    ),
    Family(
        "gpt-neox",
        "transformers",
        causal("GPTNeoXConfig", **BERT),
        {
            "*.attention.query_key_value.weight": PLAIN,  # heads alternate
            "*.attention.dense.weight": PLAIN,
            "*.mlp.dense_*.weight": PLAIN,
        },
        ("gpt_neox.embed_in.weight", "lm_head.weight"),
    ),
    Family(
        "phi3",
        "transformers",
        causal("Phi3Config", **LLM),
        {
            "*.self_attn.qkv_proj.weight": rows(64, 32, 32),
            "*.self_attn.o_proj.weight": PLAIN,
            "*.mlp.gate_up_proj.weight": rows(96, 96),
            "*.mlp.down_proj.weight": PLAIN,
        },
        EMBEDDED,
    ),
    Family(
        "gemma2",
        "transformers",
        causal("Gemma2Config", **LLM, head_dim=16),
        {**LLAMA_ATTENTION, **LLAMA_MLP},
        ("model.embed_tokens.weight",),
    ),
    Family(
        "llama-classifier",
        "transformers",
        of("LlamaForSequenceClassification", "LlamaConfig", **LLM),
        {**LLAMA_ATTENTION, **LLAMA_MLP},
        ("model.embed_tokens.weight", "score.weight"),
    ),
    Family(
        "mamba",
        "transformers",
        causal("MambaConfig", vocab_size=128, hidden_size=64, num_hidden_layers=2),
        {
            "*.mixer.in_proj.weight": rows(128, 128),
            "*.mixer.x_proj.weight": PLAIN,
            "*.mixer.dt_proj.weight": PLAIN,
            "*.mixer.out_proj.weight": PLAIN,
        },
        ("backbone.embeddings.weight", "lm_head.weight", "*.mixer.A_log", "*.mixer.conv1d.weight"),
    ),
    Family(
        "mamba2",
        "transformers",
        causal(
            "Mamba2Config",
            vocab_size=128,
            hidden_size=64,
            num_hidden_layers=1,
            head_dim=16,
            num_heads=8,
            n_groups=1,
        ),
        {"*.mixer.in_proj.weight": PLAIN, "*.mixer.out_proj.weight": PLAIN},
        ("backbone.embeddings.weight", "lm_head.weight", "*.mixer.conv1d.weight"),
    ),
    Family(
        "rwkv",
        "transformers",
        causal(
            "RwkvConfig", vocab_size=128, hidden_size=64, num_hidden_layers=1, bos_token_id=1, eos_token_id=2
        ),
        {
            "*.attention.key.weight": PLAIN,
            "*.attention.value.weight": PLAIN,
            "*.attention.receptance.weight": PLAIN,
            "*.attention.output.weight": PLAIN,
            "*.feed_forward.*.weight": PLAIN,
        },
        ("rwkv.embeddings.weight", "head.weight", "*.time_mix_*"),
    ),
    Family(
        "bert-classifier",
        "transformers",
        of("BertForSequenceClassification", "BertConfig", **BERT),
        {**BERT_LAYERS, "bert.pooler.dense.weight": PLAIN},
        ("bert.embeddings.*_embeddings.weight", "classifier.weight"),
    ),
    Family(
        "bert-questions",
        "transformers",
        of("BertForQuestionAnswering", "BertConfig", **BERT),
        BERT_LAYERS,
        ("bert.embeddings.*_embeddings.weight", "qa_outputs.weight"),
    ),
    Family(
        "bert-masked",
        "transformers",
        of("BertForMaskedLM", "BertConfig", **BERT),
        {**BERT_LAYERS, "cls.predictions.transform.dense.weight": PLAIN},
        ("bert.embeddings.*_embeddings.weight", "cls.predictions.decoder.weight"),
    ),
    Family(
        "roberta-classifier",
        "transformers",
        of("RobertaForSequenceClassification", "RobertaConfig", **BERT),
        {**BERT_LAYERS, "classifier.dense.weight": PLAIN},
        ("roberta.embeddings.*_embeddings.weight", "classifier.out_proj.weight"),
    ),
    Family(
        "t5",
        "transformers",
        of(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=128,
            d_model=64,
            d_kv=16,
            d_ff=96,
            num_layers=1,
            num_heads=4,
        ),
        {"*Attention.?.weight": PLAIN, "*.DenseReluDense.w?.weight": PLAIN},
        ("shared.weight", "lm_head.weight", "*.relative_attention_bias.weight"),
    ),
    Family(
        "whisper",
        "transformers",
        of(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            vocab_size=128,
            d_model=64,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=96,
            decoder_ffn_dim=96,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
        {
            "model.encoder.conv?.weight": KERNEL,
            "*_attn.*_proj.weight": PLAIN,
            "*.layers.*.fc?.weight": PLAIN,
        },
        ("*.embed_positions.weight", "*.embed_tokens.weight", "proj_out.weight"),
    ),
    Family(
        "wav2vec2",
        "transformers",
        of(
            "Wav2Vec2ForCTC",
            "Wav2Vec2Config",
            **{**BERT, "vocab_size": 32},
            conv_dim=(32, 32),
            conv_stride=(5, 2),
            conv_kernel=(10, 3),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4,
        ),
        {
            "*.conv_layers.*.conv.weight": KERNEL,
            "*.pos_conv_embed.conv.parametrizations.weight.original1": KERNEL,
            "*.projection.weight": PLAIN,
            "*.attention.*_proj.weight": PLAIN,
            "*.feed_forward.*_dense.weight": PLAIN,
        },
        ("lm_head.weight", "*.pos_conv_embed.conv.parametrizations.weight.original0"),
    ),
    Family(
        "clip",
        "transformers",
        of(
            "CLIPModel",
            "CLIPConfig",
            text_config={**BERT, "projection_dim": 24},
            vision_config={**BERT, "image_size": 32, "patch_size": 8},
            projection_dim=24,
        ),
        {
            "*.self_attn.*_proj.weight": PLAIN,
            "*.mlp.fc?.weight": PLAIN,
            "*.patch_embedding.weight": KERNEL,
            "*_projection.weight": PLAIN,
        },
        ("*.token_embedding.weight", "*.position_embedding.weight"),
    ),
    Family(
        "swin-transformers",
        "transformers",
        of(
            "SwinForImageClassification",
            "SwinConfig",
            image_size=32,
            patch_size=4,
            embed_dim=16,
            depths=[1, 1],
            num_heads=[2, 2],
            window_size=4,
        ),
        {
            "*.patch_embeddings.projection.weight": KERNEL,
            "*.attention.?_proj.weight": PLAIN,
            "*.mlp.fc?.weight": PLAIN,
            "*.downsample.reduction.weight": PLAIN,
        },
        ("*.relative_position_bias_table", "classifier.weight"),
    ),
]

VISION = [
    Family(
        "vit", "timm", timm("vit_tiny_patch16_224"), VIT_BLOCKS, ("cls_token", "pos_embed", "head.weight")
    ),
    Family(
        "deit-distilled",
        "timm",
        timm("deit_tiny_distilled_patch16_224"),
        VIT_BLOCKS,
        ("cls_token", "dist_token", "pos_embed", "head.weight", "head_dist.weight"),
    ),
    Family(
        "swin",
        "timm",
        timm("swin_tiny_patch4_window7_224"),
        {
            "patch_embed.proj.weight": KERNEL,
            "layers.0.*.attn.qkv.weight": rows(96, 96, 96),
            "layers.1.*.attn.qkv.weight": rows(192, 192, 192),
            "layers.2.*.attn.qkv.weight": rows(384, 384, 384),
            "layers.3.*.attn.qkv.weight": rows(768, 768, 768),
            "layers.*.attn.proj.weight": PLAIN,
            "layers.*.mlp.fc?.weight": PLAIN,
            "layers.*.downsample.reduction.weight": PLAIN,
        },
        ("*.relative_position_bias_table", "head.fc.weight"),
    ),
    Family(
        "convnext",
        "timm",
        timm("convnext_atto"),
        {"stem.0.weight": KERNEL, "stages.*.mlp.fc?.weight": KERNEL, "stages.*.downsample.1.weight": KERNEL},
        ("*.conv_dw.weight", "head.fc.weight"),
    ),
    Family(
        "eva02",
        "timm",
        timm("eva02_tiny_patch14_224"),
        {
            "patch_embed.proj.weight": KERNEL,
            "blocks.*.attn.qkv.weight": rows(192, 192, 192),
            "blocks.*.attn.proj.weight": PLAIN,
            "blocks.*.mlp.fc1.weight": rows(512, 512),  # gate and value
            "blocks.*.mlp.fc2.weight": PLAIN,
        },
        ("cls_token", "pos_embed"),
    ),
    Family(
        "mixer",
        "timm",
        timm("mixer_s32_224"),
        {"stem.proj.weight": KERNEL, "blocks.*.mlp_*.fc?.weight": PLAIN},
        ("head.weight",),
    ),
    Family(
        "mobilenet",
        "timm",
        timm("mobilenetv3_small_050"),
        {
            "conv_stem.weight": KERNEL,
            "conv_head.weight": KERNEL,
            "*.conv_pw*.weight": KERNEL,
            "*.se.conv_*.weight": KERNEL,
            "blocks.5.0.conv.weight": KERNEL,
        },
        ("*.conv_dw.weight", "classifier.weight"),
    ),
    Family(
        "resnet",
        "torchvision.models",
        vision("resnet18"),
        {"conv1.weight": KERNEL, "layer*.conv?.weight": KERNEL, "layer*.downsample.0.weight": KERNEL},
        ("fc.weight",),
    ),
    Family(
        "vit-torchvision",
        "torchvision.models",
        vision("vit_b_16"),
        {
            "conv_proj.weight": KERNEL,
            "*.self_attention.in_proj_weight": rows(768, 768, 768),
            "*.self_attention.out_proj.weight": PLAIN,
            "*.mlp.?.weight": PLAIN,
        },
        ("class_token", "encoder.pos_embedding", "heads.head.weight"),
    ),
    Family(
        "vgg",
        "torchvision.models",
        vision("vgg11"),
        {"features.*.weight": KERNEL, "classifier.0.weight": PLAIN, "classifier.3.weight": PLAIN},
        ("classifier.6.weight",),
    ),
    Family(
        "squeezenet",
        "torchvision.models",
        vision("squeezenet1_0"),
        {"features.*.weight": KERNEL},
        ("classifier.1.weight",),
    ),
    Family(
        "googlenet",
        "torchvision.models",
        vision("googlenet", init_weights=False),
        {"*.conv.weight": KERNEL, "aux?.fc1.weight": PLAIN},
        ("fc.weight", "aux?.fc2.weight"),
    ),
    Family(
        "faster-rcnn",
        "torchvision.models.detection",
        vision("fasterrcnn_mobilenet_v3_large_fpn", weights=None, weights_backbone=None),
        {
            # "1" and "0" of an inverted residual may be depthwise: see the rest.
            "backbone.fpn.*.weight": KERNEL,
            "backbone.body.0.0.weight": KERNEL,
            "backbone.body.*.fc?.weight": KERNEL,
            "backbone.body.16.0.weight": KERNEL,
            "rpn.head.conv.*.weight": KERNEL,
            "roi_heads.box_head.fc?.weight": PLAIN,
            "backbone.body.*.block.*": {"flatten": True, "depthwise": False},
        },
        ("rpn.head.cls_logits.weight", "rpn.head.bbox_pred.weight", "roi_heads.box_predictor.*.weight"),
    ),
]

DIFFUSION = [
    Family(
        "unet",
        "diffusers",
        vision(
            "UNet2DConditionModel",
            block_out_channels=(32, 64),
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=32,
            norm_num_groups=8,
            layers_per_block=1,
        ),
        {
            "conv_in.weight": KERNEL,
            "*.conv?.weight": KERNEL,
            "*.conv.weight": KERNEL,
            "*.conv_shortcut.weight": KERNEL,
            "*.proj_in.weight": KERNEL,
            "*.attentions.?.proj_out.weight": KERNEL,
            "*.time_emb_proj.weight": PLAIN,
            "time_embedding.linear_?.weight": PLAIN,
            "*.attn?.to_*.weight": PLAIN,
            "mid_block.*.ff.net.0.proj.weight": rows(256, 256),
            "*_blocks.?.*.ff.net.0.proj.weight": rows(128, 128),
            "*.ff.net.2.weight": PLAIN,
        },
        ("conv_out.weight",),
    ),
    Family(
        "flux",
        "diffusers",
        vision(
            "FluxTransformer2DModel",
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=(4, 4, 8),
        ),
        {
            "time_text_embed.*.weight": PLAIN,
            "*_embedder.weight": PLAIN,
            "*.linear.weight": PLAIN,
            "*.attn.*.weight": PLAIN,
            "transformer_blocks.*.ff*.weight": PLAIN,
            "single_transformer_blocks.*.proj_*.weight": PLAIN,
        },
        ("proj_out.weight",),
    ),
    Family(
        "dit",
        "diffusers",
        vision(
            "DiTTransformer2DModel", num_layers=1, num_attention_heads=2, attention_head_dim=16, sample_size=8
        ),
        {
            "pos_embed.proj.weight": KERNEL,
            "*.timestep_embedder.*.weight": PLAIN,
            "*.norm1.linear.weight": PLAIN,
            "*.attn1.*.weight": PLAIN,
            "*.ff.net.*.weight": PLAIN,
        },
        ("*.embedding_table.weight", "proj_out_?.weight"),
    ),
]

FAMILIES = [*TRANSFORMERS, *VISION, *DIFFUSION]


def heads(count: int) -> Keys:
    return {"num_heads": count}


def behind(count: int) -> Keys:
    """The layer behind an attention, cut along its inputs."""
    return {"num_heads": count, "split_dim": 1}


LLAMA_HEADS = {
    "*.self_attn.q_proj.weight": heads(4),
    "*.self_attn.[kv]_proj.weight": heads(2),
    "*.self_attn.o_proj.weight": behind(4),
}
BERT_HEADS = {
    "*.attention.self.*.weight": heads(4),
    "*.attention.output.dense.weight": behind(4),
}
T5_HEADS = {"*Attention.[qkv].weight": heads(4), "*Attention.o.weight": behind(4)}
PROJ_HEADS = {"*_attn.[qkv]_proj.weight": heads(4), "*_attn.out_proj.weight": behind(4)}
VIT_HEADS = {"blocks.*.attn.qkv.weight": heads(9), "blocks.*.attn.proj.weight": behind(3)}

HEADS: dict[str, dict[str, Keys]] = {
    "llama": LLAMA_HEADS,
    "llama-classifier": LLAMA_HEADS,
    "mixtral": LLAMA_HEADS,
    "qwen3-moe": LLAMA_HEADS,
    "granite-moe": LLAMA_HEADS,
    "gpt-oss": LLAMA_HEADS,
    "llama4": LLAMA_HEADS,
    "gemma2": LLAMA_HEADS,
    "qwen3-next": {
        **LLAMA_HEADS,
        "*.self_attn.q_proj.weight": heads(8),  # a query and its gate
        "*.linear_attn.in_proj_qkvz.weight": heads(12),  # 2 times a query, a key, two values and their gates
        "*.linear_attn.out_proj.weight": behind(4),
    },
    "deepseek-v3": {
        "*.self_attn.q_b_proj.weight": heads(4),
        "*.self_attn.kv_b_proj.weight": heads(8),
        "*.self_attn.o_proj.weight": behind(4),
    },
    "dbrx": {"*.attn.Wqkv.weight": heads(8), "*.attn.out_proj.weight": behind(4)},
    "switch-transformer": T5_HEADS,
    "t5": T5_HEADS,
    "gpt2": {
        "*.attn.c_attn.weight": {**behind(12), **TURNED},
        "*.attn.c_proj.weight": {**heads(4), **TURNED},
    },
    "gpt-neox": {"*.query_key_value.weight": heads(12), "*.attention.dense.weight": behind(4)},
    "phi3": {"*.qkv_proj.weight": heads(8), "*.o_proj.weight": behind(4)},
    "bert-classifier": BERT_HEADS,
    "bert-questions": BERT_HEADS,
    "bert-masked": BERT_HEADS,
    "roberta-classifier": BERT_HEADS,
    "whisper": PROJ_HEADS,
    "clip": PROJ_HEADS,
    "wav2vec2": {"*.attention.[qkv]_proj.weight": heads(4), "*.attention.out_proj.weight": behind(4)},
    "swin-transformers": {
        "*.attention.[qkv]_proj.weight": heads(2),
        "*.attention.o_proj.weight": behind(2),
    },
    "vit": VIT_HEADS,
    "deit-distilled": VIT_HEADS,
    "eva02": VIT_HEADS,
    "swin": {
        **{f"layers.{at}.*.attn.qkv.weight": heads(9 << at) for at in range(4)},
        **{f"layers.{at}.*.attn.proj.weight": behind(3 << at) for at in range(4)},
    },
    "vit-torchvision": {
        "*.self_attention.in_proj_weight": heads(36),
        "*.self_attention.out_proj.weight": behind(12),
    },
    "unet": {"*.attn?.to_[qkv].weight": heads(8), "*.attn?.to_out.0.weight": behind(8)},
    "flux": {
        "*.attn.to_[qkv].weight": heads(2),
        "*.attn.add_[qkv]_proj.weight": heads(2),
        "*.attn.to_out.0.weight": behind(2),
        "*.attn.to_add_out.weight": behind(2),
    },
    "dit": {"*.attn1.to_[qkv].weight": heads(2), "*.attn1.to_out.0.weight": behind(2)},
}
"""What ``per_head=True`` says of a family instead."""
