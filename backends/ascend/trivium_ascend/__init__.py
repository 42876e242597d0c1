"""The Ascend backend: trivium_torch with torch-npu's fused operators, Huawei's layouts of weights, and NPU graphs (docs/ascend.md).

Nothing imports torch or torch-npu before probe().
"""
