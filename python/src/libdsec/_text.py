"""Decoding of byte streams whose chunks may end in the middle of a character."""

from __future__ import annotations

import codecs

from libdsec._types import StreamName


class TextDecoder:
    """Decodes several interleaved byte streams, each on its own.

    A character that is split over two chunks of a stream comes out whole with
    the second; bytes that are no text become U+FFFD.
    """

    def __init__(self, encoding: str = "utf-8", errors: str = "replace") -> None:
        self._new = codecs.getincrementaldecoder(encoding)
        self._errors = errors
        self._decoders: dict[StreamName, codecs.IncrementalDecoder] = {}

    def decode(self, stream: StreamName, data: bytes) -> str:
        """Return the text that data completes."""
        decoder = self._decoders.get(stream)
        if decoder is None:
            decoder = self._decoders[stream] = self._new(self._errors)
        return decoder.decode(data)

    def flush(self) -> list[tuple[StreamName, str]]:
        """End every stream; return what an unfinished character in each becomes."""
        tails = [(stream, decoder.decode(b"", final=True)) for stream, decoder in self._decoders.items()]
        self._decoders.clear()
        return [(stream, text) for stream, text in tails if text]
