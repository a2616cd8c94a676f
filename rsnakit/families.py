"""What `set_stem` does to the whole of timm: the smallest model of each of its families, tried in turn."""

from collections.abc import Sequence

import pandas as pd
import timm
import torch

from rsnakit import stems, surgery

# The smallest model of each family (a family is a file of timm's models), as of timm 1.0.31.
SMALLEST = {
    "beit": "beit_base_patch16_224", "byoanet": "halonet_h1", "byobnet": "test_byobnet", "cait": "cait_xxs24_224",
    "coat": "coat_tiny", "convit": "convit_tiny", "convmixer": "convmixer_768_32", "convnext": "test_convnext",
    "cpubone": "cpubone_nano", "crossvit": "crossvit_tiny_240", "csatv2": "csatv2", "cspnet": "cs3darknet_focus_s",
    "cspnext": "cspnext_tiny", "davit": "davit_tiny", "deepseek_vit": "deepseek_vit_412m",
    "deit": "deit_tiny_patch16_224", "densenet": "densenet121", "dla": "dla46x_c", "dpn": "dpn48b",
    "edgenext": "edgenext_xx_small", "efficientformer": "efficientformer_l1",
    "efficientformer_v2": "efficientformerv2_s0", "efficientnet": "test_efficientnet",
    "efficientvim": "efficientvim_m1", "efficientvit_mit": "efficientvit_b0", "efficientvit_msra": "efficientvit_m0",
    "eva": "vit_tiny_patch16_dinov3_qkvb", "fasternet": "fasternet_t0", "fastvit": "fastvit_t8",
    "focalnet": "focalnet_tiny_srf", "gcvit": "gcvit_xxtiny", "gemma4_vit": "gemma4_vit_167m",
    "ghostnet": "ghostnet_050", "hardcorenas": "hardcorenas_b", "hgnet": "hgnetv2_b0", "hiera": "hiera_tiny_224",
    "hieradet_sam2": "sam2_hiera_tiny", "hrnet": "hrnet_w18_small", "iformer": "iformer_t",
    "inception_next": "inception_next_atto", "inception_resnet_v2": "inception_resnet_v2",
    "inception_v3": "inception_v3", "inception_v4": "inception_v4", "lcnetv2": "lcnetv2_small", "levit": "levit_128s",
    "lowformer": "lowformer_b0", "mambaout": "test_mambaout", "maxxvit": "test_coatnet",
    "metaformer": "poolformerv2_s12", "mlp_mixer": "gmlp_ti16_224", "mobilenetv3": "mobilenetv3_small_050",
    "mobilenetv5": "mobilenetv5_base", "mobilevit": "mobilevit_xxs", "mvitv2": "mvitv2_tiny",
    "naflexvit": "naflexvit_base_patch16_parfac_gap", "nasnet": "nasnetalarge", "nest": "nest_tiny",
    "nextvit": "nextvit_small", "nfnet": "test_nfnet", "pit": "pit_ti_224", "pnasnet": "pnasnet5large",
    "pvt_v2": "pvt_v2_b0", "qwen3_vit": "qwen3_vit_88m", "rdnet": "rdnet_tiny", "regnet": "regnetx_002",
    "repghost": "repghostnet_050", "repvit": "repvit_m1", "res2net": "res2next50", "resnest": "resnest14d",
    "resnet": "test_resnet", "resnetv2": "resnetv2_18", "rexnet": "rexnet_100", "selecsls": "selecsls42",
    "senet": "legacy_seresnet18", "sequencer": "sequencer2d_s", "shvit": "shvit_s1", "sknet": "skresnet18",
    "starnet": "starnet_s050", "swiftformer": "swiftformer_xs", "swin_transformer": "swin_tiny_patch4_window7_224",
    "swin_transformer_v2": "swinv2_tiny_window8_256", "swin_transformer_v2_cr": "swinv2_cr_tiny_224",
    "tiny_vit": "tiny_vit_5m_224", "tnt": "tnt_s_legacy_patch16_224", "tresnet": "tresnet_m",
    "twins": "twins_svt_small", "vgg": "vgg11", "visformer": "visformer_tiny", "vision_transformer": "test_vit",
    "vision_transformer_hybrid": "vit_tiny_r_s16_p8_224", "vision_transformer_relpos": "test_vit_relpos",
    "vision_transformer_sam": "samvit_base_patch16_224", "vitamin": "vitamin_small_224", "volo": "volo_d1_224",
    "vovnet": "ese_vovnet19b_slim_dw", "xception": "legacy_xception", "xception_aligned": "xception41p",
    "xcit": "xcit_nano_12_p8_224",
}  # fmt: skip
# Those that take longest; the others are tried within half a minute on one core.
LARGE = {
    "byoanet", "convmixer", "crossvit", "csatv2", "davit", "deepseek_vit", "densenet", "dpn", "edgenext", "efficientvim",
    "efficientvit_mit", "eva", "fastvit", "focalnet", "gemma4_vit", "ghostnet", "hardcorenas", "hieradet_sam2", "hrnet",
    "iformer", "inception_resnet_v2", "inception_v3", "inception_v4", "lowformer", "mobilenetv5", "nasnet", "nextvit",
    "pnasnet", "qwen3_vit", "rdnet", "repghost", "repvit", "sequencer", "shvit", "tiny_vit", "tnt", "vision_transformer_sam",
}  # fmt: skip
QUICK = tuple(family for family in SMALLEST if family not in LARGE)


def try_families(families: Sequence[str] | None = None) -> pd.DataFrame:
    """Halves the stem's stride in the smallest model of timm's families, on torch's meta device: no weights, no compute.

    Args:
        families: names in `SMALLEST`, such as `QUICK`; by default all. Those that the installed timm lacks are left out.

    Returns:
        A row a family: `family`, `model`, `stem` (its first convolutions), `kernel`, `stride`, `halved` (strides, largest
        kernel's), `before`, `after` (reductions of the first level as timm tells it, and as measured), `works`, and `why`
        where it is refused.

    Raises:
        ValueError: a family that there is not.
    """
    unknown = sorted(set(families or ()) - set(SMALLEST))
    if unknown:
        raise ValueError(f"no such family: {', '.join(unknown)}; there are: {', '.join(SMALLEST)}")
    chosen = {family: SMALLEST[family] for family in families or SMALLEST}
    table = pd.DataFrame([try_model(family, name) for family, name in chosen.items() if timm.is_model(name)])
    return table.astype(dict.fromkeys(("kernel", "stride", "halved", "before", "after"), "Int64"))


def try_model(family: str, name: str) -> dict[str, object]:
    """One row of `try_families`."""
    with torch.device("meta"):
        model = timm.create_model(name).eval()
    numbers = dict.fromkeys(("kernel", "stride", "halved", "before", "after"))
    row = {"family": family, "model": name, "stem": "", **numbers, "works": False, "why": ""}
    try:
        surgery.refuse_fixed(model)
        convolutions = stems.first_convolutions(model)
        widest = max(convolutions.values(), key=stems.extent, default=None)
        stride = max(widest.stride) if widest else 2
        row["stem"] = ", ".join(convolutions)
        if widest:
            row |= {"kernel": max(widest.kernel_size), "stride": stride}
        if stride == 1:
            row["why"] = "its first convolution has stride 1 already"
            return row
        row["before"] = model.feature_info[0]["reduction"]
        surgery.set_stem(model, stride=stride // 2)
        row |= {"halved": stride // 2, "after": model.feature_info[0]["reduction"], "works": True}
    except ValueError as error:
        row["why"] = str(error).removeprefix("set_stem: ").split(";")[0]
    return row
