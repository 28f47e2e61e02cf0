"""Endpoints of models that answer with vectors or scores: OpenAI's embeddings, Cohere's and Jina's rerank, score, classify, pooling."""
