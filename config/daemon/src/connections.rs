//! A bound on open connections. Whoever reaches an address can open as many as it likes and say nothing, and each is one of
//! the open files that the process may have: without one it can serve nobody and ask nobody.

use std::{
    collections::VecDeque,
    io,
    pin::Pin,
    task::{Context, Poll},
};

use axum::serve::Listener;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::oneshot,
};

/// Accepts everybody, and closes the connection that was opened first when there is one too many: whoever holds connections
/// open keeps nobody else from being served.
#[derive(Debug)]
pub struct Connections<L> {
    listener: L,
    most: usize,
    /// Of the connections that were opened last. One that is dropped closes its connection.
    open: VecDeque<oneshot::Sender<()>>,
}

/// One connection.
#[derive(Debug)]
pub struct Connection<T> {
    stream: T,
    /// Ready when it is to be closed; none from then on.
    closed: Option<oneshot::Receiver<()>>,
}

impl<L> Connections<L> {
    /// Those of `listener`, of which `most` are open at a time.
    pub fn new(listener: L, most: usize) -> Self {
        Self { listener, most, open: VecDeque::new() }
    }
}

impl<L: Listener> Listener for Connections<L> {
    type Io = Connection<L::Io>;
    type Addr = L::Addr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        // Tries again where accepting fails.
        let (stream, from) = self.listener.accept().await;
        self.open.retain(|open| !open.is_closed());
        if self.open.len() >= self.most {
            self.open.pop_front();
        }
        let (open, closed) = oneshot::channel();
        self.open.push_back(open);
        (Connection { stream, closed: Some(closed) }, from)
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

impl<T: Unpin> Connection<T> {
    /// The stream, unless it is to be closed.
    fn stream(&mut self, context: &mut Context<'_>) -> io::Result<Pin<&mut T>> {
        if self.closed.as_mut().is_none_or(|closed| Pin::new(closed).poll(context).is_ready()) {
            self.closed = None;
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        Ok(Pin::new(&mut self.stream))
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Connection<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.stream(context)?.poll_read(context, into)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Connection<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.stream(context)?.poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream(context)?.poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
