"""OpenAI's HTTP API over the engine, in the server's process and event loop; see docs/http.md."""
