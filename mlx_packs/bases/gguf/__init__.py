"""GGUF files of llama.cpp as base models."""
