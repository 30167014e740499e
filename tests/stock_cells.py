"""The cells of the matrix of stock models that ``make test`` runs; all others: ``tools/stock_matrix.py``.

Every model has its kernels compared, is called with other sizes, saved and loaded. Compiling and exporting
take up to a minute a model, so each road has some small models of several families.
"""

from __future__ import annotations

__all__ = ["CELLS"]

_ALWAYS = ("kernels", "sizes", "saved")

_MODELS = """
torchvision.resnet18: onnxruntime openvino xnnpack
torchvision.squeezenet1_1: inductor
torchvision.googlenet
torchvision.densenet121
torchvision.regnet_y_400mf
timm.resnetv2_50
transformers.ConvNextModel: onnxruntime
torchvision.mobilenet_v2
torchvision.mobilenet_v3_small: onnxruntime openvino
torchvision.mnasnet0_5
torchvision.shufflenet_v2_x0_5
torchvision.efficientnet_b0
timm.mobilenetv4_conv_small
timm.lcnet_050: xnnpack
torchvision.VisionTransformer: onnxruntime openvino xnnpack
torchvision.SwinTransformer
torchvision.swin_v2
torchvision.MaxVit
timm.vit_tiny_patch16_224
timm.mobilevitv2_050
timm.mixer_s32_224
transformers.PvtV2Model
transformers.LevitModel
torchvision.lraspp_mobilenet_v3_large
smp.Unet
smp.Linknet
transformers.SegformerForSemanticSegmentation: onnxruntime
torchvision.ssdlite320_mobilenet_v3_large
torchvision.fasterrcnn_mobilenet_v3_large_fpn
transformers.DetrForObjectDetection
facenet.PNet: compiled onnxruntime openvino
facenet.RNet
facenet.ONet: onnxruntime xnnpack
transformers.BertModel: compiled onnxruntime openvino xnnpack inductor
transformers.DistilBertModel
transformers.DebertaV2Model
transformers.ModernBertModel
transformers.T5EncoderModel
torch.nn.TransformerEncoder: onnxruntime
torch.nn.MultiheadAttention
transformers.GPT2LMHeadModel
transformers.LlamaForCausalLM: onnxruntime openvino
transformers.LlamaForCausalLM one step
transformers.GPT2LMHeadModel one step
transformers.Gemma3ForCausalLM
transformers.MixtralForCausalLM
transformers.T5ForConditionalGeneration
transformers.BartForConditionalGeneration
torch.nn.Transformer
transformers.WhisperForConditionalGeneration
transformers.Wav2Vec2ForCTC
silero_vad: onnxruntime openvino
transformers.EncodecModel
transformers.SpeechT5HifiGan: onnxruntime
transformers.ASTModel
torch.nn.LSTM
torch.nn.GRU
torch.nn.LSTMCell
torchfm.WideAndDeepModel: compiled onnxruntime openvino xnnpack inductor
torchfm.DeepFactorizationMachineModel
torchfm.DeepCrossNetworkModel
torchfm.AutomaticFeatureInteractionModel
rtdl.FTTransformer: onnxruntime
transformers.PatchTSTForPrediction
transformers.CLIPModel
"""


def _cells() -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for line in _MODELS.strip().splitlines():
        name, _, roads = line.partition(":")
        found[name.strip()] = (*_ALWAYS, *roads.split())
    return found


#: Roads by model.
CELLS = _cells()
