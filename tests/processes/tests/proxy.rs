//! The faulty network does what it says.

use std::time::{Duration, Instant};

use hypic_process_tests::{Direction, Fault, Proxy};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

const SOON: Duration = Duration::from_secs(10);
const NEVER: Duration = Duration::from_millis(100);

/// A proxy in front of a server that sends back what it gets.
async fn echo() -> Proxy {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    tokio::spawn(async move {
        while let Ok((mut connection, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut from, mut to) = connection.split();
                let _ = tokio::io::copy(&mut from, &mut to).await;
            });
        }
    });
    Proxy::to(&address).await
}

async fn dial(proxy: &Proxy) -> TcpStream {
    TcpStream::connect(proxy.address()).await.expect("the proxy listens")
}

async fn send(connection: &mut TcpStream, text: &str) {
    connection.write_all(text.as_bytes()).await.expect("an open connection");
}

/// The next `n` bytes; `None` if the connection ends before.
async fn get(connection: &mut TcpStream, n: usize) -> Option<String> {
    let mut bytes = vec![0; n];
    let read = timeout(SOON, connection.read_exact(&mut bytes)).await.expect("not stuck");
    read.ok().map(|_| String::from_utf8(bytes).expect("text"))
}

async fn nothing_comes(connection: &mut TcpStream) {
    assert!(timeout(NEVER, connection.read_u8()).await.is_err(), "something came");
}

#[tokio::test]
async fn bytes_pass_are_counted_and_the_end_too() {
    let proxy = echo().await;
    let mut connection = dial(&proxy).await;
    send(&mut connection, "hello").await;
    assert_eq!(get(&mut connection, 5).await.as_deref(), Some("hello"));
    assert_eq!([Direction::Forth, Direction::Back].map(|d| (proxy.received(d), proxy.sent(d))), [(5, 5), (5, 5)]);
    connection.shutdown().await.expect("an open connection");
    assert_eq!(connection.read(&mut [0]).await.expect("an orderly end"), 0);
}

#[tokio::test]
async fn held_bytes_come_after_the_release() {
    let proxy = echo().await;
    let mut connection = dial(&proxy).await;
    for direction in [Direction::Forth, Direction::Back] {
        proxy.set(direction, Fault::Hold);
        send(&mut connection, "abc").await;
        nothing_comes(&mut connection).await;
        assert_eq!(proxy.received(direction), proxy.sent(direction) + 3);
        send(&mut connection, "de").await;
        nothing_comes(&mut connection).await;
        assert_eq!(proxy.received(direction), proxy.sent(direction) + 5, "what comes later counts too");
        proxy.set(direction, Fault::None);
        assert_eq!(get(&mut connection, 5).await.as_deref(), Some("abcde"));
    }
}

#[tokio::test]
async fn an_end_behind_held_bytes_comes_after_them() {
    let proxy = echo().await;
    let mut connection = dial(&proxy).await;
    proxy.set(Direction::Forth, Fault::Hold);
    send(&mut connection, "abc").await;
    connection.shutdown().await.expect("an open connection");
    nothing_comes(&mut connection).await;
    proxy.set(Direction::Forth, Fault::None);
    assert_eq!(get(&mut connection, 3).await.as_deref(), Some("abc"));
    assert_eq!(connection.read(&mut [0]).await.expect("an orderly end"), 0);
}

#[tokio::test]
async fn delays_drops_and_duplicates() {
    let proxy = echo().await;
    let mut connection = dial(&proxy).await;
    let delay = Duration::from_millis(60);
    proxy.set(Direction::Back, Fault::Delay(delay));
    let began = Instant::now();
    send(&mut connection, "abc").await;
    assert_eq!(get(&mut connection, 3).await.as_deref(), Some("abc"));
    assert!(began.elapsed() >= delay);
    proxy.set(Direction::Back, Fault::Drop);
    send(&mut connection, "lost").await;
    nothing_comes(&mut connection).await;
    proxy.set(Direction::Back, Fault::Duplicate);
    send(&mut connection, "two").await;
    assert_eq!(get(&mut connection, 6).await.as_deref(), Some("twotwo"));
}

#[tokio::test]
async fn one_bit_is_flipped_once() {
    let proxy = echo().await;
    let mut connection = dial(&proxy).await;
    proxy.set(Direction::Forth, Fault::FlipAfter(5));
    for (sent, want) in [("aaa", "aaa"), ("aaa", "aaq"), ("aaaaaaa", "aaaaaaa")] {
        send(&mut connection, sent).await;
        assert_eq!(get(&mut connection, sent.len()).await.as_deref(), Some(want));
    }
    assert_eq!(proxy.fault(Direction::Forth), Fault::None);
}

#[tokio::test]
async fn truncated_and_cut_connections_are_reset() {
    let proxy = echo().await;
    let mut connection = dial(&proxy).await;
    proxy.set(Direction::Back, Fault::CutAfter(2));
    send(&mut connection, "abcd").await;
    assert_eq!(get(&mut connection, 2).await.as_deref(), Some("ab"));
    assert_eq!(get(&mut connection, 1).await, None);

    let mut idle = dial(&proxy).await;
    send(&mut idle, "x").await;
    assert_eq!(get(&mut idle, 1).await.as_deref(), Some("x"));
    proxy.set(Direction::Forth, Fault::Cut);
    assert_eq!(get(&mut idle, 1).await, None, "an idle connection is reset too");
    let mut new = dial(&proxy).await;
    assert_eq!(get(&mut new, 1).await, None, "and a new one");
    proxy.set(Direction::Forth, Fault::None);
    let mut again = dial(&proxy).await;
    send(&mut again, "y").await;
    assert_eq!(get(&mut again, 1).await.as_deref(), Some("y"));
}
