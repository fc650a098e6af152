"""The OpenAI API's models, completions, chat completions and responses, on the same samplers as the Tinker API."""
