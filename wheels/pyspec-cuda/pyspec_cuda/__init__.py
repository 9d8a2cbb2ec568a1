"""The CUDA backend of pyspec. Holds a native module that pyspec finds by entry point; nothing to import."""
