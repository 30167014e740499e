"""The cells of the matrix of stock models that ``make test`` runs; all others: ``tools/stock_matrix.py``.

Compiling and exporting take up to a minute a model, so few models go there.
"""

from __future__ import annotations

__all__ = ["CELLS"]

#: Kernels beside the reference model, other sizes, saved and loaded.
_ALL_THREE = """
torchvision.resnet18
torchvision.squeezenet1_1
torchvision.googlenet
torchvision.densenet121
torchvision.regnet_y_400mf
timm.resnetv2_50
transformers.ConvNextModel
torchvision.mobilenet_v2
torchvision.mobilenet_v3_small
torchvision.mnasnet0_5
torchvision.shufflenet_v2_x0_5
timm.mobilenetv4_conv_small
timm.lcnet_050
torchvision.VisionTransformer
timm.vit_tiny_patch16_224
torch.nn.LSTM
"""
_SOME = """
torchvision.efficientnet_b0: kernels sizes repeated
torchvision.SwinTransformer: kernels sizes saved
torchvision.swin_v2: kernels sizes
torchvision.MaxVit: kernels sizes saved
timm.mobilevitv2_050: kernels saved
timm.mixer_s32_224: saved
transformers.PvtV2Model: saved
transformers.LevitModel: saved
torchvision.lraspp_mobilenet_v3_large: kernels saved
smp.Unet: kernels saved repeated
smp.Linknet: kernels saved
transformers.SegformerForSemanticSegmentation: kernels saved
torchvision.ssdlite320_mobilenet_v3_large: kernels saved
torchvision.fasterrcnn_mobilenet_v3_large_fpn: kernels saved
transformers.DetrForObjectDetection: saved
facenet.PNet: kernels sizes saved onnxruntime
facenet.RNet: kernels saved
facenet.ONet: kernels saved
transformers.BertModel: kernels saved repeated
transformers.DistilBertModel: kernels saved
transformers.DebertaV2Model: saved
transformers.ModernBertModel: kernels saved
transformers.T5EncoderModel: kernels saved
torch.nn.TransformerEncoder: kernels saved
torch.nn.MultiheadAttention: kernels saved
transformers.GPT2LMHeadModel: kernels saved repeated
transformers.LlamaForCausalLM one step: kernels saved
transformers.T5ForConditionalGeneration: kernels saved
transformers.Wav2Vec2ForCTC: kernels saved
silero_vad: kernels saved repeated
torchcrepe.tiny: kernels saved
torchfm.WideAndDeepModel: kernels sizes saved onnxruntime openvino
torchfm.DeepFactorizationMachineModel: kernels saved
torchfm.ExtremeDeepFactorizationMachineModel: kernels saved
torchfm.DeepCrossNetworkModel: kernels saved
torchfm.NeuralFactorizationMachineModel: kernels saved
torchfm.AutomaticFeatureInteractionModel: kernels saved
torchfm.ProductNeuralNetworkModel: kernels saved
"""


def _cells() -> dict[str, tuple[str, ...]]:
    found = {
        name.strip(): ("kernels", "sizes", "saved") for name in _ALL_THREE.strip().splitlines()
    }
    cells: dict[str, tuple[str, ...]] = dict(found)
    for line in _SOME.strip().splitlines():
        name, _, roads = line.partition(": ")
        cells[name] = tuple(roads.split())
    return cells


#: Roads by model.
CELLS = _cells()
