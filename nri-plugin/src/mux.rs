//! The NRI's multiplexer: two connections over one socket, as containerd/nri's `pkg/net/multiplex` frames them.
//! It carries bytes and knows nothing of what they say.
//!
//! A frame is a connection number and a payload length, both 32 bits big-endian, then the payload.

use std::io;

use tokio::io::{
    AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadHalf, WriteHalf, copy, sink,
};

/// The connection on which the plugin serves and the runtime calls (`multiplex.PluginServiceConn`).
pub const PLUGIN_CONNECTION: u32 = 1;

/// The connection on which the runtime serves and the plugin calls (`multiplex.RuntimeServiceConn`).
pub const RUNTIME_CONNECTION: u32 = 2;

/// Bytes of a frame's header.
const HEADER: usize = 8;

/// Longest payload that is sent. The runtime's multiplexer fails a read whose buffer is shorter than the frame, and
/// its ttrpc reads through a buffer of 4096 bytes (Go's `bufio.NewReader`): a longer frame ends the connection.
pub const MAX_FRAME_SENT: usize = 4096;

/// Longest payload that is taken: a ttrpc message of 4 MiB and its header, which the runtime may put in one frame.
pub const MAX_FRAME_TAKEN: u64 = (4 << 20) + 10;

/// Bytes that a connection holds for its reader before the sender has to wait.
const BUFFER: usize = 64 << 10;

/// The two connections, and the work that moves their bytes.
pub struct Mux<T> {
    /// Where the plugin serves.
    pub plugin: DuplexStream,
    /// Where the plugin calls the runtime.
    pub runtime: DuplexStream,
    /// Moves the bytes; nothing flows unless [`Driver::run`] is polled.
    pub driver: Driver<T>,
}

/// The work of a [`Mux`].
pub struct Driver<T> {
    trunk: T,
    plugin: DuplexStream,
    runtime: DuplexStream,
}

impl<T: AsyncRead + AsyncWrite> Mux<T> {
    /// Multiplexes over `trunk`. Nothing is sent by this alone.
    pub fn new(trunk: T) -> Self {
        let (plugin, plugin_end) = tokio::io::duplex(BUFFER);
        let (runtime, runtime_end) = tokio::io::duplex(BUFFER);
        Self { plugin, runtime, driver: Driver { trunk, plugin: plugin_end, runtime: runtime_end } }
    }
}

impl<T: AsyncRead + AsyncWrite> Driver<T> {
    /// Moves bytes until the trunk ends (`Ok`) or fails, or what it carries is no NRI.
    pub async fn run(self) -> io::Result<()> {
        let (from_trunk, to_trunk) = tokio::io::split(self.trunk);
        let (from_plugin, to_plugin) = tokio::io::split(self.plugin);
        let (from_runtime, to_runtime) = tokio::io::split(self.runtime);
        tokio::select! {
            ended = take_apart(from_trunk, to_plugin, to_runtime) => ended,
            ended = put_together(to_trunk, from_plugin, from_runtime) => ended,
        }
    }
}

/// Takes the trunk's frames apart. Payloads are passed on as they come in, so a frame costs no memory of its own.
async fn take_apart<T: AsyncRead>(
    mut trunk: ReadHalf<T>,
    mut plugin: WriteHalf<DuplexStream>,
    mut runtime: WriteHalf<DuplexStream>,
) -> io::Result<()> {
    loop {
        let mut header = [0; HEADER];
        match trunk.read_exact(&mut header).await {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            read => read?,
        };
        let [c0, c1, c2, c3, l0, l1, l2, l3] = header;
        let connection = u32::from_be_bytes([c0, c1, c2, c3]);
        let length = u64::from(u32::from_be_bytes([l0, l1, l2, l3]));
        if length > MAX_FRAME_TAKEN {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!(
                    "a frame of {length} bytes, where the NRI has at most {MAX_FRAME_TAKEN}: the peer speaks no NRI"
                ),
            ));
        }
        let mut payload = (&mut trunk).take(length);
        let moved = match connection {
            PLUGIN_CONNECTION => copy(&mut payload, &mut plugin).await?,
            RUNTIME_CONNECTION => copy(&mut payload, &mut runtime).await?,
            // As the runtime's own multiplexer does with connections that nobody opened.
            _ => copy(&mut payload, &mut sink()).await?,
        };
        if moved < length {
            return Ok(());
        }
    }
}

/// Makes frames of what the connections send, one write a frame.
async fn put_together<T: AsyncWrite>(
    mut trunk: WriteHalf<T>,
    mut plugin: ReadHalf<DuplexStream>,
    mut runtime: ReadHalf<DuplexStream>,
) -> io::Result<()> {
    let mut plugin_frame = [0; HEADER + MAX_FRAME_SENT];
    let mut runtime_frame = [0; HEADER + MAX_FRAME_SENT];
    loop {
        let (connection, frame, length) = tokio::select! {
            read = plugin.read(&mut plugin_frame[HEADER..]) => (PLUGIN_CONNECTION, &mut plugin_frame, read?),
            read = runtime.read(&mut runtime_frame[HEADER..]) => (RUNTIME_CONNECTION, &mut runtime_frame, read?),
        };
        if length == 0 {
            // One of our own ends was dropped: the session is over.
            return Ok(());
        }
        frame[..4].copy_from_slice(&connection.to_be_bytes());
        // At most MAX_FRAME_SENT, so it fits.
        frame[4..HEADER].copy_from_slice(&u32::try_from(length).unwrap_or(0).to_be_bytes());
        trunk.write_all(&frame[..HEADER + length]).await?;
        trunk.flush().await?;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokio::{io::duplex, runtime::Builder};

    use super::*;

    fn block_on<F: Future>(future: F) -> F::Output {
        Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    fn frame(connection: u32, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap();
        [&connection.to_be_bytes()[..], &length.to_be_bytes(), payload].concat()
    }

    /// Reads frames as Go's multiplexer and ttrpc do: header first, then the payload into a buffer of 4096 bytes.
    async fn read_as_go(trunk: &mut (impl AsyncRead + Unpin)) -> (u32, Vec<u8>) {
        let connection = trunk.read_u32().await.unwrap();
        let length = trunk.read_u32().await.unwrap() as usize;
        assert!((1..=4096).contains(&length), "Go's read fails with ENOMEM for a frame of {length} bytes");
        let mut payload = vec![0; length];
        trunk.read_exact(&mut payload).await.unwrap();
        (connection, payload)
    }

    #[test]
    fn long_messages_leave_in_frames_that_go_can_read() {
        block_on(async {
            let (near, mut far) = duplex(1 << 16);
            let Mux { mut plugin, mut runtime, driver } = Mux::new(near);
            let driver = tokio::spawn(driver.run());
            let (long, short): (Vec<u8>, _) = ((0..=u8::MAX).cycle().take(300_001).collect(), b"hello");
            let send_long = long.clone();
            let sender = tokio::spawn(async move {
                plugin.write_all(&send_long).await.unwrap();
                plugin
            });
            runtime.write_all(short).await.unwrap();
            let (mut got_long, mut got_short) = (Vec::new(), Vec::new());
            while got_long.len() < long.len() || got_short.len() < short.len() {
                let (connection, payload) = read_as_go(&mut far).await;
                match connection {
                    PLUGIN_CONNECTION => got_long.extend(payload),
                    RUNTIME_CONNECTION => got_short.extend(payload),
                    other => panic!("connection {other}"),
                }
            }
            assert!(got_long == long && got_short == short);
            let plugin = sender.await.unwrap();
            drop(far);
            driver.await.unwrap().unwrap();
            drop(plugin);
        });
    }

    #[test]
    fn frames_of_any_size_arrive_in_order_on_their_connection() {
        block_on(async {
            let (near, mut far) = duplex(1 << 16);
            let Mux { mut plugin, mut runtime, driver } = Mux::new(near);
            let driver = tokio::spawn(driver.run());
            let big = vec![7; 1 << 20];
            let sent = big.clone();
            let writer = tokio::spawn(async move {
                far.write_all(&frame(PLUGIN_CONNECTION, b"ab")).await.unwrap();
                far.write_all(&frame(9, b"nobody opened this")).await.unwrap();
                far.write_all(&frame(0, b"reserved")).await.unwrap();
                far.write_all(&frame(RUNTIME_CONNECTION, b"")).await.unwrap();
                far.write_all(&frame(RUNTIME_CONNECTION, b"x")).await.unwrap();
                far.write_all(&frame(PLUGIN_CONNECTION, &sent)).await.unwrap();
            });
            let mut got = vec![0; 2 + big.len()];
            plugin.read_exact(&mut got).await.unwrap();
            assert!(got[..2] == *b"ab" && got[2..] == big);
            assert_eq!(runtime.read_u8().await.unwrap(), b'x');
            writer.await.unwrap();
            driver.await.unwrap().unwrap();
        });
    }

    #[test]
    fn a_peer_that_speaks_something_else_is_named() {
        block_on(async {
            let (near, mut far) = duplex(1 << 16);
            let mux = Mux::new(near);
            far.write_all(b"HTTP/1.1 400 Bad Request\r\n").await.unwrap();
            let error = mux.driver.run().await.unwrap_err().to_string();
            assert!(error.contains("speaks no NRI"), "{error}");
        });
    }

    proptest! {
        /// Whatever comes in, in whatever pieces, is passed on, skipped or refused; nothing panics or hangs.
        #[test]
        fn garbage_is_survived(
            pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..20),
            small_lengths: bool,
        ) {
            block_on(async {
                let (near, mut far) = duplex(64);
                let Mux { mut plugin, mut runtime, driver } = Mux::new(near);
                let write = async move {
                    for mut piece in pieces {
                        if small_lengths && piece.len() >= 8 {
                            piece[..3].fill(0);
                            piece[4..7].fill(0);
                        }
                        if far.write_all(&piece).await.is_err() {
                            break;
                        }
                    }
                };
                let (_, _, _, _) = tokio::join!(
                    driver.run(),
                    write,
                    async { copy(&mut plugin, &mut sink()).await },
                    async { copy(&mut runtime, &mut sink()).await },
                );
            });
        }

        /// Interleaved frames of two connections come out as two streams.
        #[test]
        fn interleaving_is_undone(frames in prop::collection::vec(
            (1..=2_u32, prop::collection::vec(any::<u8>(), 0..200)), 0..40,
        )) {
            block_on(async {
                let (near, mut far) = duplex(333);
                let Mux { mut plugin, mut runtime, driver } = Mux::new(near);
                let sent = frames.clone();
                let write = async move {
                    for (connection, payload) in &sent {
                        far.write_all(&frame(*connection, payload)).await.unwrap();
                    }
                };
                let (mut one, mut two) = (Vec::new(), Vec::new());
                let (ended, (), _, _) = tokio::join!(
                    driver.run(),
                    write,
                    async { plugin.read_to_end(&mut one).await },
                    async { runtime.read_to_end(&mut two).await },
                );
                ended.unwrap();
                let of = |wanted| frames.iter().filter(move |(c, _)| *c == wanted).flat_map(|(_, p)| p.clone());
                assert_eq!(one, of(1).collect::<Vec<u8>>());
                assert_eq!(two, of(2).collect::<Vec<u8>>());
            });
        }
    }
}
