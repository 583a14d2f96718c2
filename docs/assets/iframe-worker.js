/*
 * Search without a server: a browser starts no Worker for a page that was opened as a file. An invisible iframe
 * replaces it. The plugin "offline" of mkdocs-material would load this code from unpkg.com.
 * After iframe-worker, https://github.com/squidfunk/iframe-worker, Copyright (c) 2020-2024 Martin Donath, MIT license.
 */
"use strict";
(() => {
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.iframe = document.createElement("iframe");
      this.iframe.hidden = true;
      document.body.appendChild(this.iframe);
      const inside = this.iframe.contentWindow;
      addEventListener("message", (event) => {
        if (event.source === inside) {
          this.dispatchEvent(new MessageEvent("message", { data: event.data }));
          if (this.onmessage) this.onmessage(event);
        }
      });
      inside.document.open();
      inside.document.write(`<html><body><script>
        postMessage = (message) => parent.postMessage(message, "*");
        importScripts = async (...urls) => {
          for (const url of urls) {
            await new Promise((resolve) => {
              const script = document.createElement("script");
              script.src = url;
              script.onload = resolve;
              document.body.appendChild(script);
            });
          }
        };
      <\/script><script src="${url}"><\/script></body></html>`);
      inside.document.close();
      this.loaded = new Promise((resolve) => { inside.onload = resolve; });
    }

    postMessage(data) {
      this.loaded.then(() => {
        this.iframe.contentWindow.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }));
      });
    }

    terminate() {
      this.iframe.remove();
    }
  }

  if (location.protocol === "file:") window.Worker = IFrameWorker;
})();
