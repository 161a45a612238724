"""The channel: links by whatever medium, and one bell that all of them ring."""

from collections.abc import Sequence

from ronde.coordination.control.bell import Ears
from ronde.coordination.control.channel import Channel, Loss
from ronde.coordination.control.link import Medium
from ronde.coordination.control.rounds import Rounds
from ronde.coordination.tree import Tree


class LinkedChannel(Channel):
    """Carries messages over links; with none it is the channel of a world of one.

    Whatever happens on a link rings the bell, which is all that a wait looks at.
    """

    def __init__(
        self,
        ears: Ears,
        tree: Tree,
        media: Sequence[Medium] = (),
        rounds: Rounds | None = None,
    ) -> None:
        """Take media over; they are closed with this one.

        Args:
            ears: Hear the bell that the links ring.
            tree: Who the neighbours are.
            media: What carries the links.
            rounds: See ``Channel``.
        """
        self.tree = tree
        self.rounds = rounds
        self._ears = ears
        self._media = tuple(media)
        self._links = {link.rank: link for medium in media for link in medium.links}
        self._losses: list[Loss] = []

    def send(self, to: int, message: bytes) -> None:
        """Send over the neighbour's link: see ``Channel``."""
        link = self._links.get(to)
        if link is not None:
            link.send(message)

    def receive(self) -> list[tuple[int, bytes]]:
        """Empty all links: see ``Channel``."""
        received: list[tuple[int, bytes]] = []
        self._ears.hear()
        for link in self._links.values():
            link.receive(received)
        return received

    def wait(self, timeout_s: float | None, *, is_eager: bool) -> None:
        """Wait for the bell: see ``Channel``."""
        self._ears.wait(timeout_s, is_eager=is_eager)

    def wake(self) -> None:
        """Ring one's own bell: see ``Channel``."""
        self._ears.wake()

    def attend(self) -> None:
        """Let listeners sleep: see ``Channel``."""
        self._ears.attend()

    def leave(self) -> None:
        """Take one ``attend`` back: see ``Channel``."""
        self._ears.leave()

    def find_losses(self) -> list[Loss]:
        """Ask all links: see ``Channel``."""
        for link in tuple(self._links.values()):
            loss = link.find_loss()
            if loss is None:
                continue
            if link.has_unread():
                # It may have ended after it wrote and before it rang.
                self._ears.bell.ring()
                continue
            self._losses.append(loss)
            del self._links[link.rank]
        return list(self._losses)

    def close(self) -> None:
        """Close the media; calls may be repeated: see ``Channel``."""
        media, self._media = self._media, ()
        self._links = {}
        for medium in media:
            medium.close()
        self._ears.close()
