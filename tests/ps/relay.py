# SPDX-License-Identifier: Apache-2.0
"""A TCP relay that counts bytes, breaks a connection or changes a bit after so many, is as slow as
a link, or answers in the server's place."""

import contextlib
import socket
import threading


class Relay:
    """Passes bytes between a free port and a server's port, until told to cut."""

    def __init__(self, port: int) -> None:
        self.num_cuts = 0
        self.num_connections = 0
        self.bytes_per_s: float | None = None  # each way of each connection
        self.answer: bytes | None = None  # to each new connection, which is closed then
        self.moved = {"up": 0, "down": 0}  # bytes that were passed on
        self.port = port
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._left: dict[str, int | None] = {"up": None, "down": None}
        self._flips = False
        self._dead: set[socket.socket] = set()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"

    def __enter__(self) -> "Relay":
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        with self._lock:
            ends = [self.listener, *self._sockets]
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def cut_after(self, direction: str, num_bytes: int) -> None:
        """Cuts the connection that carries byte `num_bytes` from now on, up or down, once."""
        with self._lock:
            self._left[direction], self._flips = num_bytes, False

    def flip_after(self, direction: str, num_bytes: int) -> None:
        """Changes a bit of byte `num_bytes` from now on, up or down, once."""
        with self._lock:
            self._left[direction], self._flips = num_bytes, True

    def forget(self) -> None:
        """From now on the connections that are there end in nothing, as behind a router."""
        with self._lock:
            self._dead |= set(self._sockets)

    def cut(self) -> None:
        """Cuts all connections that are there."""
        with self._lock:
            for end in self._sockets:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            if self.answer is not None:
                self._start(self._answer, near, self.answer)
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self.port))
            except OSError:  # there is no server now
                near.close()
                continue
            with self._lock:
                self.num_connections += 1
                self._sockets += [near, far]
            self._start(self._pump, near, far, "up")
            self._start(self._pump, far, near, "down")

    def _answer(self, near: socket.socket, answer: bytes) -> None:
        with near, contextlib.suppress(OSError):
            near.settimeout(10)
            near.recv(1 << 14)
            near.sendall(answer)
            near.shutdown(socket.SHUT_WR)
            while near.recv(1 << 14):  # else it would be reset, with what was sent
                pass

    def _pump(self, source: socket.socket, target: socket.socket, direction: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                if self.bytes_per_s is not None:
                    self._closed.wait(len(data) / self.bytes_per_s)
                with self._lock:
                    if source in self._dead:
                        continue
                    left = self._left[direction]
                    if left is not None:
                        self._left[direction] = left - len(data)
                        if left <= len(data):
                            self._left[direction] = None
                            self.num_cuts += 1
                            if not self._flips:
                                break
                            data = _flipped(data, left - 1)
                    self.moved[direction] += len(data)
                target.sendall(data)
        if source in self._dead:
            return  # who is at the other end does not hear of it
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _flipped(data: bytes, place: int) -> bytes:
    changed = bytearray(data)
    changed[place] ^= 0x10
    return bytes(changed)
