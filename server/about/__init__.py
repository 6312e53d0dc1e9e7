"""What clients ask about the server itself: models, tokens, health, the API's description, the console."""
