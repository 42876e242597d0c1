"""OpenVINO as a trivium backend: Programs become OpenVINO models."""
