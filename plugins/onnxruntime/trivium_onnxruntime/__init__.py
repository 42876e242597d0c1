"""trivium's backend `onnxruntime`: Programs as ONNX models. See plugin.py."""
