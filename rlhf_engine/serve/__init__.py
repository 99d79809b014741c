"""An OpenAI endpoint for the policies of one base."""
