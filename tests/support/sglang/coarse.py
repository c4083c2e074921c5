"""An SGLang plugin with a weight quantization that runs on any CPU, and is coarse enough to be seen in outputs.

It is installed as a distribution of its own (see plugins.py), so it imports nothing of these tests.
"""

import os

NAME = "kvprov_coarse"
SWITCH = "TEST_COARSE_BITS"
"""Environment variable: bits of each weight. Without it the plugin does nothing."""


def register():
    """Offer `quantization="kvprov_coarse"` in this process. SGLang calls it in each of its processes."""
    bits = os.environ.get(SWITCH)
    if bits is None:
        return
    from sglang.srt.arg_groups.choices import QUANTIZATION_CHOICES
    from sglang.srt.layers import quantization

    quantization.QUANTIZATION_METHODS[NAME] = _config(int(bits))
    if NAME not in QUANTIZATION_CHOICES:
        QUANTIZATION_CHOICES.append(NAME)


def _config(bits):
    import torch
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.quantization.base_config import QuantizationConfig
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    largest = 2 ** (bits - 1) - 1

    class Method(UnquantizedLinearMethod):
        """Integers of `bits` bits with a scale for each output channel."""

        def process_weights_after_loading(self, layer):
            weight = layer.weight.data.float()
            scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-8) / largest
            layer.weight_scale = torch.nn.Parameter(scale, requires_grad=False)
            integers = (weight / scale).round().clamp(-largest, largest).to(torch.int8)
            layer.weight = torch.nn.Parameter(integers, requires_grad=False)

        def apply(self, layer, x, bias=None):
            weight = (layer.weight.float() * layer.weight_scale).to(x.dtype)
            return torch.nn.functional.linear(x, weight, bias)

    class Config(QuantizationConfig):
        """What SGLang asks of a quantization."""

        @classmethod
        def get_name(cls):
            return NAME

        @classmethod
        def get_supported_act_dtypes(cls):
            return [torch.float16, torch.bfloat16, torch.float32]

        @classmethod
        def get_min_capability(cls):
            return 0

        @staticmethod
        def get_config_filenames():
            return []

        @classmethod
        def from_config(cls, config):
            return cls()

        def get_scaled_act_names(self):
            return []

        def get_quant_method(self, layer, prefix):
            return Method() if isinstance(layer, LinearBase) else None

    return Config
