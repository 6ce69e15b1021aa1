// A browser starts no Worker for a page that is a file. Here the script of the search runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inner = frame.contentWindow;
      this.inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = this.inner.document.createElement("script");
      script.src = url;
      this.ready = new Promise((done) => script.addEventListener("load", done));
      this.inner.document.body.append(script);
    }

    async postMessage(data) {
      await this.ready;
      this.inner.dispatchEvent(new MessageEvent("message", { data }));
    }
  };
}
