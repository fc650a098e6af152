"""The OpenAI API's models, completions and chat completions, on the same samplers as the Tinker API."""
