"""Export of trained adapters and reward models: in the formats of other libraries, with a card, to the Hub."""
