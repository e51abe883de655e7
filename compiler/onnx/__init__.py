"""The logical program as an ONNX model of standard operators: a forward pass over whole sequences, without a cache."""
