//! Whether this replica may answer: it has read all nodes and pods, and no other replica leads.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Instant,
};

use thiserror::Error;
use tokio::sync::watch;

/// Whether this replica leads.
#[derive(Clone, Debug)]
pub enum Lead {
    /// There is no other: kube-scheduler beside it is the one that is elected.
    Alone,
    /// Until the time that the lease says, if it says one.
    Lease(watch::Receiver<Option<Instant>>),
}

/// What this replica may do.
#[derive(Debug)]
pub struct Standing {
    lead: Lead,
    nodes: AtomicBool,
    pods: AtomicBool,
}

/// Why this replica does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NotServing {
    /// Another replica leads, or none does yet.
    #[error("this replica of vcuda-scheduler does not lead; the one that holds the lease answers")]
    Follower,
    /// It has just started.
    #[error("vcuda-scheduler is still reading the cluster's nodes and pods; it is tried again")]
    Reading,
}

impl Standing {
    /// A replica that has read nothing yet.
    pub fn new(lead: Lead) -> Self {
        Self { lead, nodes: AtomicBool::new(false), pods: AtomicBool::new(false) }
    }

    /// All nodes were read.
    pub fn nodes_read(&self) {
        self.nodes.store(true, Ordering::Release);
    }

    /// All pods were read.
    pub fn pods_read(&self) {
        self.pods.store(true, Ordering::Release);
    }

    /// Whether this replica leads.
    pub fn leads(&self) -> bool {
        match &self.lead {
            Lead::Alone => true,
            Lead::Lease(until) => until.borrow().is_some_and(|until| Instant::now() < until),
        }
    }

    /// Whether it may answer.
    pub fn check(&self) -> Result<(), NotServing> {
        if !self.leads() {
            Err(NotServing::Follower)
        } else if self.nodes.load(Ordering::Acquire) && self.pods.load(Ordering::Acquire) {
            Ok(())
        } else {
            Err(NotServing::Reading)
        }
    }
}
