//! The kubelet's connections with an authority that is one.
//!
//! Kubelets before 1.26 name the path of the socket as HTTP/2's `:authority` (kubernetes/kubernetes
//! pull request 112597), which h2 refuses as malformed, as RFC 9113 lets it. [`Rewriter`] puts
//! `localhost` in its place, in what the kubelet sends, before h2 sees it. Pure, but for
//! [`KubeletConnection`], which reads by it.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use loona_hpack::Decoder;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;

/// What a client begins with (RFC 9113, 3.4), in bytes.
const PREFACE_BYTES: usize = 24;

/// A frame's head (RFC 9113, 4.1), in bytes: three of length, type, flags, four of the stream.
const HEAD_BYTES: usize = 9;

/// The longest frame that a server takes which says nothing else (`SETTINGS_MAX_FRAME_SIZE`).
const MOST_FRAME_BYTES: usize = 16_384;

/// The most bytes of all headers of one request that are taken.
const MOST_HEADER_BYTES: usize = 64 << 10;

const HEADERS: u8 = 0x1;
const CONTINUATION: u8 = 0x9;
const END_STREAM: u8 = 0x1;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;

/// What is no HTTP/2.
#[derive(Debug, PartialEq, Eq)]
pub struct Malformed;

/// Rewrites what a client sends.
pub struct Rewriter {
    /// Bytes of the preface that haven't come yet.
    preface: usize,
    /// What came and is no whole frame yet.
    rest: Vec<u8>,
    decoder: Decoder<'static>,
    /// Headers that go on in the next frame: the head that they began with, and what there is.
    begun: Option<([u8; HEAD_BYTES], Vec<u8>)>,
}

impl std::fmt::Debug for Rewriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rewriter").field("rest", &self.rest.len()).finish_non_exhaustive()
    }
}

impl Default for Rewriter {
    fn default() -> Self {
        Rewriter { preface: PREFACE_BYTES, rest: Vec::new(), decoder: Decoder::new(), begun: None }
    }
}

impl Rewriter {
    /// Adds to `out` what becomes of `input`, which follows what came before. A frame comes out when
    /// it is whole.
    ///
    /// # Errors
    ///
    /// If it is no HTTP/2.
    pub fn rewrite(&mut self, mut input: &[u8], out: &mut Vec<u8>) -> Result<(), Malformed> {
        let preface = self.preface.min(input.len());
        out.extend_from_slice(&input[..preface]);
        self.preface -= preface;
        input = &input[preface..];
        self.rest.extend_from_slice(input);
        let mut at = 0;
        while let Some(head) = self.rest.get(at..at + HEAD_BYTES) {
            let head: [u8; HEAD_BYTES] = head.try_into().map_err(|_| Malformed)?;
            let length =
                usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
            if length > MOST_FRAME_BYTES {
                return Err(Malformed);
            }
            let end = at + HEAD_BYTES + length;
            let Some(payload) = self.rest.get(at + HEAD_BYTES..end) else { break };
            let payload = payload.to_vec();
            self.frame(head, &payload, out)?;
            at = end;
        }
        self.rest.drain(..at);
        Ok(())
    }

    fn frame(
        &mut self,
        head: [u8; HEAD_BYTES],
        payload: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(), Malformed> {
        let (kind, flags) = (head[3], head[4]);
        let (first, mut block) = match (kind, self.begun.take()) {
            (HEADERS, None) => (head, fragment(flags, payload)?.to_vec()),
            (CONTINUATION, Some((first, block))) if first[5..] == head[5..] => {
                (first, [&block, payload].concat())
            }
            (HEADERS | CONTINUATION, _) | (_, Some(_)) => return Err(Malformed),
            (_, None) => {
                out.extend_from_slice(&head);
                out.extend_from_slice(payload);
                return Ok(());
            }
        };
        if block.len() > MOST_HEADER_BYTES {
            return Err(Malformed);
        }
        if flags & END_HEADERS == 0 {
            self.begun = Some((first, block));
            return Ok(());
        }
        let headers = self.decoder.decode(&block).map_err(|_| Malformed)?;
        block.clear();
        for (name, value) in headers {
            let value = if name == b":authority" { b"localhost".to_vec() } else { value };
            write_header(&name, &value, &mut block);
        }
        // Longer than a frame may be: no request of the kubelet's.
        if block.len() > MOST_FRAME_BYTES {
            return Err(Malformed);
        }
        let length = u32::try_from(block.len()).map_err(|_| Malformed)?.to_be_bytes();
        out.extend_from_slice(&length[1..]);
        out.extend_from_slice(&[HEADERS, END_HEADERS | first[4] & END_STREAM]);
        out.extend_from_slice(&first[5..]);
        out.extend_from_slice(&block);
        Ok(())
    }
}

/// The headers in a frame, without padding and priority (RFC 9113, 6.2).
fn fragment(flags: u8, payload: &[u8]) -> Result<&[u8], Malformed> {
    let (padding, payload) = match flags & PADDED {
        0 => (0, payload),
        _ => payload
            .split_first()
            .map(|(padding, rest)| (usize::from(*padding), rest))
            .ok_or(Malformed)?,
    };
    let begin = if flags & PRIORITY == 0 { 0 } else { 5 };
    let end = payload.len().checked_sub(padding).ok_or(Malformed)?;
    payload.get(begin..end).ok_or(Malformed)
}

/// Writes a header that changes no table: a literal without indexing, with a new name (RFC 7541,
/// 6.2.2).
fn write_header(name: &[u8], value: &[u8], out: &mut Vec<u8>) {
    out.push(0);
    for text in [name, value] {
        write_length(text.len(), out);
        out.extend_from_slice(text);
    }
}

/// Writes a length as an integer with a prefix of seven bits (RFC 7541, 5.1).
fn write_length(length: usize, out: &mut Vec<u8>) {
    const MOST: usize = 0x7f;
    if length < MOST {
        out.extend(u8::try_from(length));
        return;
    }
    out.push(0x7f);
    let mut rest = length - MOST;
    while rest >= 0x80 {
        out.extend(u8::try_from(rest & 0x7f | 0x80));
        rest >>= 7;
    }
    out.extend(u8::try_from(rest));
}

/// A connection whose client's authority is `localhost`.
#[derive(Debug)]
pub struct KubeletConnection<S> {
    stream: S,
    rewriter: Rewriter,
    /// What is to be read, and how much of it was.
    ready: Vec<u8>,
    read: usize,
}

impl<S> KubeletConnection<S> {
    /// That of `stream`, from its beginning.
    pub fn new(stream: S) -> Self {
        KubeletConnection { stream, rewriter: Rewriter::default(), ready: Vec::new(), read: 0 }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for KubeletConnection<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        while this.read == this.ready.len() {
            this.ready.clear();
            this.read = 0;
            let mut bytes = [0; 4096];
            let mut came = ReadBuf::new(&mut bytes);
            ready!(Pin::new(&mut this.stream).poll_read(context, &mut came))?;
            if came.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
            let rewritten = this.rewriter.rewrite(came.filled(), &mut this.ready);
            rewritten.map_err(|Malformed| io::Error::other("the kubelet speaks no HTTP/2"))?;
        }
        let left = &this.ready[this.read..];
        let taken = left.len().min(buffer.remaining());
        buffer.put_slice(&left[..taken]);
        this.read += taken;
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for KubeletConnection<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

impl<S> Connected for KubeletConnection<S> {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use loona_hpack::Encoder;
    use proptest::prelude::*;

    const PREFACE: &[u8; PREFACE_BYTES] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

    fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
    }

    /// The frames in `bytes`, which begin with the preface: type, flags, stream, payload.
    fn frames(bytes: &[u8]) -> Vec<(u8, u8, u32, Vec<u8>)> {
        let mut rest = bytes.strip_prefix(PREFACE).unwrap();
        let mut frames = Vec::new();
        while let Some((head, more)) = rest.split_at_checked(HEAD_BYTES) {
            let length = usize::from(head[1]) << 8 | usize::from(head[2]);
            let stream = u32::from_be_bytes(head[5..].try_into().unwrap());
            frames.push((head[3], head[4], stream, more[..length].to_vec()));
            rest = &more[length..];
        }
        frames
    }

    fn headers(path: &str) -> Vec<(Vec<u8>, Vec<u8>)> {
        let all = [
            (":method", "POST"),
            (":path", path),
            (":authority", "/var/lib/kubelet/device-plugins/cgpu-gpu-mem.sock"),
            ("te", "trailers"),
        ];
        all.map(|(name, value)| (name.into(), value.into())).into()
    }

    fn encoded(encoder: &mut Encoder<'_>, headers: &[(Vec<u8>, Vec<u8>)]) -> Vec<u8> {
        encoder.encode(headers.iter().map(|(name, value)| (&name[..], &value[..])))
    }

    /// Two requests: the second one's headers are in the table by the first; it comes in two frames,
    /// with padding and a priority.
    fn requests() -> Vec<u8> {
        let mut encoder = Encoder::new();
        let first = encoded(&mut encoder, &headers("/a"));
        let second = encoded(&mut encoder, &headers("/b"));
        let (begin, end) = second.split_at(second.len() / 2);
        let padded = [&[3][..], &[0; 5], begin, &[0; 3]].concat();
        [
            PREFACE.to_vec(),
            frame(0x4, 0, 0, &[]),
            frame(HEADERS, END_HEADERS, 1, &first),
            frame(0, END_STREAM, 1, b"body"),
            frame(HEADERS, PADDED | PRIORITY | END_STREAM, 3, &padded),
            frame(CONTINUATION, END_HEADERS, 3, end),
        ]
        .concat()
    }

    fn rewritten(pieces: &[&[u8]]) -> Result<Vec<u8>, Malformed> {
        let (mut rewriter, mut out) = (Rewriter::default(), Vec::new());
        pieces.iter().try_for_each(|piece| rewriter.rewrite(piece, &mut out))?;
        Ok(out)
    }

    /// The authority becomes localhost, and all else stays as it was.
    #[test]
    fn only_the_authority_is_rewritten_to_localhost() {
        let out = rewritten(&[&requests()]).unwrap();
        let found = frames(&out);
        let heads: Vec<_> = found.iter().map(|frame| (frame.0, frame.1, frame.2)).collect();
        let with_end = END_HEADERS | END_STREAM;
        assert_eq!(
            heads,
            [(4, 0, 0), (HEADERS, END_HEADERS, 1), (0, END_STREAM, 1), (HEADERS, with_end, 3)]
        );
        assert_eq!(found[2].3, b"body");
        let mut decoder = Decoder::new();
        for (at, path) in [(1, "/a"), (3, "/b")] {
            let mut expected = headers(path);
            expected[2].1 = b"localhost".to_vec();
            assert_eq!(decoder.decode(&found[at].3).unwrap(), expected);
        }
    }

    #[test]
    fn what_is_no_http_2_ends_the_connection() {
        let after = |frames: &[Vec<u8>]| rewritten(&[PREFACE, &frames.concat()]);
        for frames in [
            vec![frame(CONTINUATION, END_HEADERS, 1, &[])],
            vec![frame(HEADERS, 0, 1, &[]), frame(0, 0, 1, &[])],
            vec![frame(HEADERS, 0, 1, &[]), frame(CONTINUATION, END_HEADERS, 3, &[])],
            vec![frame(HEADERS, END_HEADERS | PADDED, 1, &[9, 0])],
            vec![frame(HEADERS, END_HEADERS | PRIORITY, 1, &[0])],
            vec![frame(HEADERS, END_HEADERS, 1, &[0xff; 9])],
            vec![vec![0xff; HEAD_BYTES]],
        ] {
            assert_eq!(after(&frames), Err(Malformed), "{frames:?}");
        }
        let endless = vec![0; MOST_FRAME_BYTES];
        let mut frames = vec![frame(HEADERS, 0, 1, &endless)];
        frames.extend((0..5).map(|_| frame(CONTINUATION, 0, 1, &endless)));
        assert_eq!(after(&frames), Err(Malformed));
    }

    proptest! {
        #[test]
        fn it_comes_out_the_same_however_it_comes(cuts in prop::collection::vec(0_usize..400, 0..8)) {
            let all = requests();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(all.len())).collect();
            cuts.sort_unstable();
            cuts.push(all.len());
            let mut begin = 0;
            let pieces: Vec<&[u8]> = cuts
                .iter()
                .map(|cut| {
                    let piece = &all[begin..*cut];
                    begin = *cut;
                    piece
                })
                .collect();
            prop_assert_eq!(rewritten(&pieces), rewritten(&[&all]));
        }

        #[test]
        fn lengths_are_read_as_they_are_written(length in 0_usize..20_000) {
            let (mut block, value) = (Vec::new(), vec![b'x'; length]);
            write_header(b"name", &value, &mut block);
            let decoded = Decoder::new().decode(&block).unwrap();
            prop_assert_eq!(decoded, [(b"name".to_vec(), value)]);
        }

        #[test]
        fn no_bytes_break_it(bytes: Vec<u8>) {
            let _ = rewritten(&[PREFACE, &bytes]);
        }
    }
}
